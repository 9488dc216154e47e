"""The forward pass in plain NumPy, to be read beside spec/model.md 4 and 5.

`forward` follows section 4 in its order and its names, `state` is section 5, `products` the int8
arithmetic of spec/numerics.md 1. Slow on purpose: engines are tested against it, none of it serves.
"""

from ds4d.model.reference.forward import Reference
from ds4d.model.reference.state import State

__all__ = ["Reference", "State"]
