"""What a plugin author builds a family from, beside `dsplit` itself."""

from dsplit.models.image_vae import one_frame
from dsplit.models.noise import FlowMatch
from dsplit.models.precision import unrounded
from dsplit.models.shared import draw_latents, load_image

__all__ = ["FlowMatch", "draw_latents", "load_image", "one_frame", "unrounded"]
