"""Array types of what crosses from the host to the device."""

from __future__ import annotations

import numpy as np
from jax import Array

AnyArray = Array | np.ndarray
"""The host fills NumPy arrays, the step sees device ones."""

AnyScalar = AnyArray | np.generic
