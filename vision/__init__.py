"""From pixels to rows of the prompt: preprocess, tower, embed."""

from .embed import ImageEmbedder, image_blocks, place
from .preprocess import BUDGETS, Patches, load_image, preprocess
from .tower import VisionTower

__all__ = ["BUDGETS", "ImageEmbedder", "Patches", "VisionTower", "image_blocks", "load_image", "place", "preprocess"]
