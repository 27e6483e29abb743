"""`python -m benchmarks all`: the measurement of whole models; every other benchmark is a separate module."""

import click

from benchmarks.performance.run import main as everything

main = click.Group("benchmarks", commands={"all": everything})

if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
