"""Milliseconds of a step of 4,096 tokens beside other tools, from `benchmarks/results/peers.json`."""

from training_step import draw


if __name__ == "__main__":
    draw(4096, __file__)
