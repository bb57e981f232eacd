"""jaxtyping annotations, and the letters of the axes.

`A` agents, `B` rows (segments) of a batch, `T` steps of a segment, `L` layers, `H` hidden size,
`M` tokens, `D` features, `N` rows of any kind. Dense bodies carry the letters as a suffix: `x_BTD`.
"""

from jaxtyping import Bool, Float, Int, Shaped, UInt8
from torch import Tensor

__all__ = ["Bool", "Float", "Int", "Shaped", "Tensor", "UInt8"]
