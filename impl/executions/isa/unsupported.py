"""What keeps assembly from being executed here, told apart from what is wrong with it."""


class UnsupportedInstruction(Exception):
    """The text holds something that the executor does not model: it is named, never guessed.

    `str` is one sentence that names the instruction, modifier, mode or directive and, where known, its line.
    """
