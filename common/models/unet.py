"""A small U-Net (Ronneberger et al. 2015): a class for each pixel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class UNet(nn.Module):
    """Images (b, channels, h, w) -> logits (b, classes, h, w), sides of any length. Two halvings, `width` channels at
    first; GroupNorm, which says nothing of other sites and takes batches of one."""

    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.first, self.second = _block(channels, width), _block(width, 2 * width)
        self.bottom = _block(2 * width, 4 * width)
        self.up_second, self.up_first = _block(6 * width, 2 * width), _block(3 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of each pixel."""
        first = self.first(images)
        second = self.second(functional.max_pool2d(first, 2, ceil_mode=True))
        bottom = self.bottom(functional.max_pool2d(second, 2, ceil_mode=True))
        second = self.up_second(torch.cat([_grown(bottom, second), second], 1))
        first = self.up_first(torch.cat([_grown(second, first), first], 1))
        logits: Tensor = self.head(first)
        return logits


def _block(before: int, after: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv2d(channels, after, 3, padding=1, bias=False), nn.GroupNorm(min(4, after), after), nn.ReLU()]
    return nn.Sequential(*layers)


def _grown(small: Tensor, like: Tensor) -> Tensor:
    """Each pixel four times, cut to the size of `like`: no kernel whose gradient hangs on the order of its sums."""
    large = small.repeat_interleave(2, 2).repeat_interleave(2, 3)
    return large[:, :, : like.shape[2], : like.shape[3]]
