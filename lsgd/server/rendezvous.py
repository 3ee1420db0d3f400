"""Passes the addresses from which the members of a generation build process groups."""

from dataclasses import dataclass, field

from lsgd.protocol.messages import Get, Put, Value


@dataclass
class Rendezvous:
    """Values of the current generation by key, and who waits for which."""

    generation: int = 0
    values: dict[str, bytes] = field(default_factory=dict)
    waiting: dict[str, list[tuple[str, int]]] = field(default_factory=dict)

    def begin(self, generation: int) -> None:
        """Forget everything, unless the generation is the same."""
        if generation != self.generation:
            self.generation, self.values, self.waiting = generation, {}, {}

    def put(self, message: Put) -> list[tuple[str, int, Value]]:
        """Store a value and return what to send to members that wait for it, as (worker, incarnation, value)."""
        if message.generation != self.generation:
            return []
        self.values[message.key] = message.value
        value = Value(message.generation, message.key, message.value)
        return [(*who, value) for who in self.waiting.pop(message.key, [])]

    def get(self, message: Get) -> Value | None:
        """Return the value, or None: then :meth:`put` returns it later."""
        if message.generation != self.generation:
            return None
        if message.key in self.values:
            return Value(message.generation, message.key, self.values[message.key])
        who = (message.worker, message.incarnation)
        if who not in self.waiting.setdefault(message.key, []):
            self.waiting[message.key].append(who)
        return None
