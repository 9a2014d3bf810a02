"""dsplit: two-stage training for diffusion models. What a plugin author imports."""

from dsplit.hookspecs import hookimpl
from dsplit.models.family import Column, Component, ModelFamily, Task
from dsplit.units import unit

__version__ = "0.1.0"
__all__ = ["Column", "Component", "ModelFamily", "Task", "__version__", "hookimpl", "unit"]
