"""How moments may be kept: the planes of each kind, and the numbers on which compiled loops and tensors agree."""

from headrace.terms.layout import Plane
from headrace.update.rules.loops import TILE_ELEMENTS

# Parameters that share one scale where moments have 8 bits (Dettmers et al. 2022, section 2: small blocks contain outliers).
MOMENT_BLOCK_ELEMENTS = TILE_ELEMENTS
# The planes by kind of moments. int8 has codes, and for each block the unit in which its codes count.
MOMENT_PLANES = {
    "float32": (Plane("m", "float32", 4), Plane("v", "float32", 4)),
    "bfloat16": (Plane("m", "uint16", 2), Plane("v", "uint16", 2)),
    "int8": (
        Plane("m", "int8", 1),
        Plane("v", "uint8", 1),
        Plane("m_unit", "float32", 4, MOMENT_BLOCK_ELEMENTS),
        Plane("v_unit", "float32", 4, MOMENT_BLOCK_ELEMENTS),
    ),
}
# How moments may be kept; the first is the default, and the only one that is exact. `OTHER_NAMES` are what people call them
# besides.
MOMENTS = tuple(MOMENT_PLANES)
OTHER_NAMES = {"bf16": "bfloat16", "fp32": "float32", "8bit": "int8", "uint8": "int8"}
# The largest codes of 8-bit moments: a first moment has a sign and 7 bits, the root of a second moment has 8 bits.
LARGEST_M, LARGEST_V = 127, 255
# Shift and factor of each round of the hash for random rounding, and the shift after the last round: see `_noise`.
NOISE_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))
NOISE_LAST_SHIFT = 16
# A block whose first moments are all smaller than this is kept as zero: its unit would have no inverse in fp32. AdamW's steps
# for such moments vanish beside any epsilon in use.
SMALLEST_M = 2.0**-100
