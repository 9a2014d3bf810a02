"""What a plugin author builds a family from, beside `dsplit` itself."""

from dsplit.models.image_vae import one_frame
from dsplit.models.noise import FlowMatch
from dsplit.models.precision import unrounded
from dsplit.models.shared import load_image

__all__ = ["FlowMatch", "load_image", "one_frame", "unrounded"]
