"""Compiles the executor of machine code for this machine, once: `python -m impl.executions.isa.warm`."""

from impl.executions.isa.machine import warm

if __name__ == "__main__":
    warm()
