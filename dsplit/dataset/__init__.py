"""The data set: metadata or a plain folder, read into checked rows."""

from dsplit.dataset.read import read_dataset
from dsplit.dataset.rows import Dataset, Row

__all__ = ["Dataset", "Row", "read_dataset"]
