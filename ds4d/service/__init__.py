"""The running daemon as its operator sees it: its state and why, and what may be asked of it.

`service` owns the state machine of spec/serving.md 2.4, drain, stop, and what systemd is told. Its
helpers each own one thing: `settings` what holds and who said so, `reload` how other settings take
their place, `levels` log levels for a while, `memory` a look at the host's memory once a second.
The control socket asks, the parts obey: nothing here knows sockets or lanes.
"""

from ds4d.service.service import Service
from ds4d.service.settings import rules

__all__ = ["Service", "rules"]
