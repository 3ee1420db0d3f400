"""Codes of two words, which one machine shows and a person types on the other one."""

import difflib
import re
import secrets

from lsgd.errors import ConfigError

WORDS = tuple(
    """
    acid acorn actor agent album alley amber angle ankle apple apron arena armor arrow aspen atlas
    attic autumn bacon badge bagel baker bamboo banjo barrel basil basket beach beaver bell berry bishop
    blanket blossom bonus border bottle boxer brass bread breeze brick bridge bronze broom bucket buffalo bugle
    butter button cabin cactus camel camera canal candle canoe canyon carbon cargo carpet carrot castle cedar
    cello chalk cherry chess cider cinema circus citrus clay cliff clock cloud clover cobalt cobra cocoa
    comet copper coral cotton coyote crane crater crayon cricket crimson crystal curtain cushion daisy dancer denim
    desert diamond diesel dinner dolphin donkey dragon drum eagle easel ebony echo eclipse elbow elder ember
    emerald engine envoy fabric falcon feather fender ferry fiddle finch flame flute forest fossil fountain fox
    galaxy garden garlic gecko geyser ginger giraffe glacier globe goblin goose granite grape gravel guitar hammer
    harbor harvest hazel helmet heron hockey honey hornet hotel iceberg igloo indigo iris island ivory jacket
    jaguar jasmine jelly jigsaw jungle kayak kernel kettle kitten koala ladder lagoon lantern laser lemon leopard
    lilac lizard lobster locket lotus lunar magnet mango maple marble meadow melon meteor mirror mosaic muffin
    nectar nickel nutmeg oasis ocean olive onyx orbit orchid otter oyster paddle panda panther parade parrot
    pebble pencil pepper piano pigeon pilot planet plaza plum pocket pollen poppy prairie prism puffin pumpkin
    quartz rabbit radar raven ribbon river robin rocket ruby saddle saffron salmon sapphire satin saturn scarlet
    shadow sierra silver sparrow spruce sunset temple thunder tiger topaz tulip tundra turtle velvet violet walnut
    """.split()
)
"""256 words, so a code of two is one of 65,536."""

TRIES = 3
"""Wrong codes until nobody can pair any more: a guesser's chance is 1 in 21,845."""


def new_code() -> str:
    """Return a random code."""
    return " ".join(secrets.choice(WORDS) for _ in range(2))


def parse_code(text: str) -> str:
    """Return the code that a person typed, whatever is between the words.

    Raises:
        ConfigError: it is none; the message has the nearest words.
    """
    words = re.findall(r"[a-z]+", text.lower())
    if len(words) != 2:
        raise ConfigError(f"a code has two words, such as {WORDS[108]} {WORDS[209]}, and this has {len(words)}")
    for word in words:
        if word not in WORDS:
            near = difflib.get_close_matches(word, WORDS, 1)
            raise ConfigError(f"{word!r} is in no code" + (f"; did you mean {near[0]}?" if near else ""))
    return " ".join(words)


class OwnCode:
    """The code that this machine shows, and how often somebody has tried it.

    Attributes:
        words: the code.
        wrong: number of wrong codes so far.
        under_way: number of tries of which nobody knows yet whether they are right.
    """

    def __init__(self, words: str) -> None:
        self.words = words
        self.wrong = 0
        self.under_way = 0

    @property
    def is_spent(self) -> bool:
        """Whether nobody can pair by it any more."""
        return self.wrong >= TRIES

    def acquire(self) -> bool:
        """Begin a try, if one is left: tries at the same time count as wrong until they are over."""
        may = self.wrong + self.under_way < TRIES
        self.under_way += may
        return may

    def release(self, *, wrong: bool) -> None:
        """End a try. One that was broken off before its proof has told nobody anything, and does not count."""
        self.under_way -= 1
        self.wrong += wrong
