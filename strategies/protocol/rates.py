"""The learning rate of a round, by the schedule of `[local]` or `[server]`: a function of settings and round alone."""

from __future__ import annotations

import math

from common.experiment import LocalSettings, ServerSettings


def rate(settings: LocalSettings | ServerSettings, round: int, rounds: int) -> float:
    """The rate of `round`, from 1, of a run of `rounds`.

    constant:    lr
    exponential: lr decay^(round - 1)
    cosine:      lr (1 + cos(pi (round - 1) / rounds)) / 2
    step:        lr drop_factor^floor((round - 1) / drop_every)
    list:        lr times the factor of the last pair [first round, factor] of `factors` that has begun; 1 before

    In the first `warm_up` rounds times round / warm_up: linear, the whole rate in the last of them.
    """
    lr, kind = settings.lr, settings.schedule
    if kind == "exponential":
        lr = settings.lr * settings.decay ** (round - 1)
    elif kind == "cosine":
        lr = settings.lr * (1 + math.cos(math.pi * (round - 1) / rounds)) / 2
    elif kind == "step" and settings.drop_every is not None:
        lr = settings.lr * settings.drop_factor ** ((round - 1) // settings.drop_every)
    elif kind == "list":
        lr = settings.lr * next((factor for first, factor in reversed(settings.factors) if first <= round), 1.0)
    return lr * (round / settings.warm_up) if round < settings.warm_up else lr


def scheduled(settings: LocalSettings | ServerSettings) -> bool:
    """Whether the rate differs from round to round."""
    return settings.schedule != "constant" or settings.warm_up > 1
