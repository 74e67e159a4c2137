"""Random changes of training images: a batch at once, as bytes, on the device where it lies."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

PADDING = 4


def crop_flip(images: Tensor) -> Tensor:
    """Each image padded with four rows and columns of zeros (black) on every side, cut back to its size at a random
    place, and mirrored left to right with probability 1/2: (b, h, w) or (b, h, w, channels), the same shape back.

    One draw of torch's global generator of the batch's device for each image. See `cut`.
    """
    places = 2 * PADDING + 1
    chance = torch.randint(2 * places * places, (len(images),), device=images.device)
    return cut(images, chance // (2 * places), chance // 2 % places, chance % 2 == 1)


def cut(images: Tensor, top: Tensor, left: Tensor, mirrored: Tensor) -> Tensor:
    """The window of each padded image that begins at row `top` and column `left`, both (b,) and from 0 to 8, mirrored
    where `mirrored` (b,) is true.

    As one gather of pixels by number: twice as fast on a CPU as advanced indexing by row and column.
    """
    count, height, breadth = images.shape[:3]
    padding = (0, 0) * (images.ndim - 3) + (PADDING,) * 4
    padded = functional.pad(images, padding).reshape(-1, *images.shape[3:])
    first, rows, columns = _numbers(count, height, breadth, images.device)
    columns = torch.where(mirrored[:, None], breadth - 1 - columns, columns) + left[:, None]
    starts = (first + top)[:, None] + rows
    pixels = starts[:, :, None] * (breadth + 2 * PADDING) + columns[:, None, :]
    return padded.index_select(0, pixels.view(-1)).view(images.shape)


@lru_cache(maxsize=64)
def _numbers(count: int, height: int, breadth: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The first row of each padded image, the rows and the columns of one."""
    first = torch.arange(count, device=device) * (height + 2 * PADDING)
    return first, torch.arange(height, device=device), torch.arange(breadth, device=device)
