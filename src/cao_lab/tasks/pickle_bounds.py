"""What a pickle would build, worked out from its instructions without building it: how deep, how many, how large.

A few kilobytes can describe tuples nested so deeply that hashing them overflows the stack, or values that refer to
one another so often that counting them never ends.
"""

import pickletools
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any

MOST_INSTRUCTIONS = 1_000_000
MOST_VALUES = 10_000_000
MOST_CHARACTERS = 1 << 30
DEEPEST = 32

NUMBERS = frozenset(
    {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
    | {"NONE", "NEWTRUE", "NEWFALSE"}
)
TEXTS = frozenset(
    {"STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "GLOBAL"}
    | {"UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
)
EMPTY = frozenset({"EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE"})
# How many values on top of the stack an instruction makes into a new one.
JOINED = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "STACK_GLOBAL": 2, "REDUCE": 2, "NEWOBJ": 2}
# How many values on top of the stack an instruction puts into the one below them.
PUT_INTO = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}
PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
NOTHING = frozenset({"PROTO", "FRAME", "STOP"})


@dataclass(slots=True)
class Extent:
    """What a value comes to when everything it refers to is written out."""

    values: int = 1
    characters: int = 0
    depth: int = 1
    can_grow: bool = False

    def take(self, parts: list["Extent"]) -> "Extent":
        """Add the parts of a value, and refuse what is too much."""
        self.values += sum(part.values for part in parts)
        self.characters += sum(part.characters for part in parts)
        self.depth = max([self.depth, *(part.depth + 1 for part in parts)])
        if self.values > MOST_VALUES or self.characters > MOST_CHARACTERS:
            raise UnpicklingError("it describes more values than data ever need")
        if self.depth > DEEPEST:
            raise UnpicklingError(f"it nests values more than {DEEPEST} deep")
        return self


def check_bounds(file: Any) -> None:
    """Follow the instructions of a pickle, from something with `read` and `readline`; refuse what would be too much."""
    machine = Machine()
    for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):
        if count > MOST_INSTRUCTIONS:
            raise UnpicklingError(f"it has more than {MOST_INSTRUCTIONS} instructions")
        machine.follow(opcode.name, argument)


class Machine:
    """The stack and the memory of an unpickler, with extents in the place of values."""

    def __init__(self) -> None:
        self.stack: list[Extent] = []
        self.marks: list[int] = []
        self.memory: dict[int, Extent] = {}
        self.number = Extent()
        self.called = Extent()

    def follow(self, name: str, argument: Any) -> None:
        """Do what an instruction does to the stack."""
        if name in NUMBERS:
            self.stack.append(self.number)
        elif name in TEXTS:
            self.stack.append(Extent(characters=len(argument)))
        elif name in EMPTY:
            self.stack.append(Extent(can_grow=name != "EMPTY_TUPLE"))
        elif name in JOINED:
            self.join(self.top(JOINED[name]), name)
        elif name in PUT_INTO:
            parts = self.top(PUT_INTO[name])
            self.stack[-1].take(parts)
        elif name == "MARK":
            self.marks.append(len(self.stack))
        elif name in ("TUPLE", "LIST", "DICT"):
            self.join(self.above_the_mark(), name)
        elif name in ("APPENDS", "SETITEMS"):
            parts = self.above_the_mark()
            self.stack[-1].take(parts)
        elif name in PUTS:
            self.memory[len(self.memory) if name == "MEMOIZE" else argument] = self.stack[-1]
        elif name in GETS:
            self.get(argument)
        elif name not in NOTHING:
            raise UnpicklingError(f"it has an instruction {name}, which data never need")

    def join(self, parts: list[Extent], name: str) -> None:
        """Put a new value in the place of its parts."""
        value = Extent(can_grow=name in ("LIST", "DICT")).take(parts)
        if name == "REDUCE":
            # Every call may make a copy of what it is given, however often it was given before.
            self.called.take([Extent(value.values, value.characters)])
        self.stack.append(value)

    def get(self, place: int) -> None:
        """Refer to an earlier value; one that can still grow could come to contain itself."""
        if self.memory[place].can_grow:
            raise UnpicklingError("it refers to a list or dict more than once")
        self.stack.append(self.memory[place])

    def top(self, count: int) -> list[Extent]:
        """Take values from the stack."""
        if len(self.stack) < count:
            raise UnpicklingError("it takes more from the stack than there is")
        parts = self.stack[-count:]
        del self.stack[-count:]
        return parts

    def above_the_mark(self) -> list[Extent]:
        """Take the values above the last mark from the stack."""
        mark = self.marks.pop()
        parts = self.stack[mark:]
        del self.stack[mark:]
        return parts
