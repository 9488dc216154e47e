"""Check a table of tools and show some of it: `python -m ops.tiny.catalog FILE [N]`."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from ops.tiny.catalog import CatalogError, parse


def main() -> None:
    path = Path(sys.argv[1])
    try:
        entries = parse(path.read_text("utf-8"), path.name)
    except (CatalogError, OSError) as error:
        sys.exit(str(error))
    from ops.tiny.tools.known import from_entry
    from ops.tiny.words import Words

    w = Words(random.Random())
    for entry in random.sample(entries, min(len(entries), int([*sys.argv, "12"][2]))):
        made = from_entry(w, entry)
        print(f"{made.request}\n    {made.name} {json.dumps(made.arguments)}")
    print(f"{len(entries)} tools, {sum(len(e.requests) for e in entries)} requests")


if __name__ == "__main__":
    main()
