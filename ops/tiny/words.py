"""Words, names and values that the dialogues are made of; every pool has a held-out part.

Words come from lists, from syllables, and from random pieces of the vocabulary. The last kind is
there so that copying cannot be learned as recalling: half of all that is drawn for training is text
that never comes a second time. `unseen` draws only the tenth of all words that training never sees.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable


T = TypeVar("T")


def held_out(word: str) -> bool:
    """Whether `word` belongs to the tenth that only evaluation uses."""
    return zlib.crc32(word.encode()) % 10 == 0


def _two(words: Iterable[str]) -> tuple[list[str], list[str]]:
    words = list(dict.fromkeys(words))
    return [w for w in words if not held_out(w)], [w for w in words if held_out(w)]


POOLS = {
    "person": """Ana Ben Carla David Emma Felix Grace Hugo Iris Jack Karen Leo Maria Noah Olga Paul
    Quinn Rosa Sam Tina Umar Vera Will Xenia Yusuf Zoe Alan Bella Chen Diego Elena Frank Gina Hans
    Ivan Julia Kofi Lena Marco Nina Omar Petra Ravi Sofia Tom Uma Victor Wendy Yara Zack Amir Boris
    Clara Dora Eric Fatima Greta Henry Ida Jonas Kim Lucas Mina Nora Oscar Priya Rita Simon Tara
    Alice Bob Charlie Daisy Edward Fiona George Hannah Isaac Jane Kevin Laura Mike Nancy Oliver
    Peter Rachel Steve Teresa Walter Anton Bruno Cyril Daria Esther Farid Gloria Hilda Ismail
    Mr.Brown Mr.Green Mrs.White Dr.Stone Dr.Adams Linda Martin Susan Thomas Helen James John Mary
    Robert Lisa Sara Adam Eva Ada Alan Linus Grete Otto Emil Frida Gustav Harald Ingrid Jens Klara
    Lars Mats Nils Ole Pia Rolf Sven Tove Ulla Viktor""",
    "city": """Paris Rome Oslo Berlin Madrid London Vienna Lisbon Dublin Athens Prague Warsaw
    Budapest Helsinki Stockholm Copenhagen Brussels Amsterdam Zurich Geneva Milan Naples Turin
    Venice Munich Hamburg Cologne Lyon Nice Marseille Porto Seville Valencia Barcelona Tokyo Kyoto
    Osaka Seoul Beijing Shanghai Delhi Mumbai Chennai Bangkok Hanoi Manila Jakarta Sydney Melbourne
    Perth Auckland Wellington Cairo Tunis Lagos Accra Nairobi Kampala Dakar Lima Quito Bogota
    Santiago Havana Toronto Montreal Ottawa Vancouver Boston Chicago Denver Seattle Portland Austin
    Dallas Houston Miami Atlanta Phoenix Detroit Cleveland Riga Vilnius Tallinn Sofia Bucharest
    Zagreb Belgrade Skopje Tirana Malta Ankara Istanbul Izmir Tehran Baghdad Amman Beirut Doha
    Dubai Muscat Karachi Lahore Dhaka Kabul Tashkent Tbilisi Baku Yerevan Bergen Malmo Graz Bonn
    Ghent Basel Bern Leeds York Bath Cork Nantes Lille Genoa Bari Pisa Siena Turku New_York
    San_Francisco Los_Angeles Cape_Town Hong_Kong Buenos_Aires New_Delhi Rio Mexico_City""",
    "thing": """apple bag ball bell bike boat book bottle bowl box bread brush bucket button
    cake camera candle car card chair clock coat coin cup desk dish door dress drum engine fan
    flag flower fork game glass glove guitar hammer hat helmet horn jacket jar key kite knife
    ladder lamp laptop letter lock map mirror mug needle notebook oven paint pan paper pen
    pencil phone piano picture pillow plant plate printer radio ring rope ruler sack scarf
    screen shelf shirt shoe shovel soap sofa spoon stamp stone stool table tent ticket tie toy
    tray truck umbrella van vase violin wagon wallet watch wheel whistle window wire basket
    blanket bridge cabinet carpet chain crate curtain drill drone fence filter kettle magnet
    motor pump robot rocket saddle sensor sled tank telescope tractor trumpet tunnel turbine
    valve""",
    "color": "red blue green yellow black white brown grey orange purple pink silver golden",
    "animal": """cat dog horse cow pig goat sheep duck goose hen fox wolf bear deer mouse rabbit
    frog owl crow eagle swan whale shark seal otter badger beaver camel donkey lion tiger zebra
    monkey parrot pigeon turtle snake lizard spider bee ant""",
    "food": """apple pear plum banana cherry grape lemon tomato potato carrot onion garlic rice
    bread cheese butter milk egg fish chicken soup salad pizza pasta cake cookie honey sugar salt
    pepper mushroom spinach bean corn pumpkin cabbage walnut almond yogurt coffee tea juice""",
    "job": """doctor nurse teacher farmer baker pilot sailor painter writer singer dancer driver
    cook tailor lawyer judge engineer carpenter plumber gardener librarian mechanic dentist""",
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "month": """January February March April May June July August September October November
    December""",
    "language": """English French German Spanish Italian Portuguese Dutch Danish Swedish Norwegian
    Finnish Polish Czech Greek Turkish Arabic Hebrew Hindi Korean Japanese Chinese Russian""",
    "verb": """get find list create delete send search book set add remove open close start stop
    check update fetch read write show count move copy rename play pause save load print order
    cancel buy sell track translate convert compute measure plan report share sort merge split
    upload download lock unlock block reserve assign archive restore export import validate scan
    publish schedule query lookup inspect register submit approve reject notify record compare
    estimate""",
    "noun": """account address alarm album answer article audio backup balance bill branch budget
    bug build bus calendar call camera case channel chart class client code comment company
    contact contract course currency customer date delivery device document draft driver email
    employee entry error event exam file flight folder form game goal group guest holiday hotel
    house image invoice issue item job key label language lesson light link list location log
    machine map match meal meeting member memory menu message meter model movie music network news
    note number offer office order package page paper park password patient payment person phone
    photo picture place plan plant player playlist poem point policy post price printer product
    profile project question queue quote rate recipe record refund reminder report reservation
    result review ride road room route rule sale sample schedule school score screen seat sensor
    server session shape shift ship shop signal site skill song speaker sport station status step
    stock store story street student subject survey switch system table task team temperature test
    text theme ticket time timer title token tour track trade train transfer translation trip unit
    user vehicle version video visit voice volume vote wallet warning weather website word zone""",
    "field": """name title city country date time amount price quantity count limit size color
    language message subject body email phone address user id code status type category priority
    level unit format path file folder url query text topic source target start end duration
    distance weight height width speed temperature rating score author owner note comment label tag
    room seat number year month day hour minute currency percent radius depth page offset mode theme
    style volume brightness channel device host port branch version key value reason place person
    company product model brand genre artist album song team player station line platform gate""",
    "flag": """verbose urgent recursive dry_run public private notify enabled active strict silent
    force repeat detailed include_hidden archived express gift_wrap round_trip vegetarian metric
    compact pinned shuffle overwrite encrypted anonymous refundable""",
    "choice": """small medium large low high normal fast slow draft final daily weekly monthly
    yearly north south east west open closed pending done json csv xml pdf asc desc celsius
    fahrenheit morning noon evening night left right top bottom auto manual light dark economy
    business first basic premium bronze silver gold bus train car bike summer winter spring autumn
    metric imperial soft hard short long local remote mono stereo""",
    "word": (Path(__file__).parent / "words.txt").read_text("utf-8"),
}  # fmt: skip
_SPLIT = {
    k: _two(w.replace("_", " ") if k == "city" else w for w in v.split()) for k, v in POOLS.items()
}
SYLLABLES = """ba be bi bo bu da de di do du fa fe fi fo fu ga ge gi go gu ka ke ki ko ku la le li
lo lu ma me mi mo mu na ne ni no nu pa pe pi po pu ra re ri ro ru sa se si so su ta te ti to tu va
ve vi vo vu za ze zi zo zu bar den fol gri kem lun mor nex por quil ras ston tren
vex wol zan""".split()


# Pieces that a novel word is made of: the vocabulary's letter tokens.
_TOKENS: list[str] = json.loads((Path(__file__).parent / "vocabulary.json").read_text("utf-8"))[
    "tokens"
]
_LOWER = [t for t in _TOKENS if re.fullmatch("[a-z]{1,8}", t)]
_MIXED = [t for t in _TOKENS if re.fullmatch("[A-Za-z]{1,8}", t)]
_LETTERS, _DIGITS = "abcdefghijklmnopqrstuvwxyz", "0123456789"
# How much of a pool's draws are novel words, before `Words.novelty`: 1 is that share.
_NOVEL = {
    "person": 1.0, "city": 1.0, "thing": 0.7, "food": 0.7, "noun": 1.0, "word": 0.0, "field": 0.9,
    "verb": 0.9, "flag": 0.7, "choice": 0.9, "animal": 0.5, "job": 0.5, "color": 0.3,
    "language": 0.3,
}  # fmt: skip


class Words:
    """Draws values with one generator. `unseen`: only from what training never sees, where a pool
    is open; closed pools (days, months, colours, verbs) are the same for both. `novelty` is the
    share of novel words: half in training, less in evaluation, as in use; none for the making of
    the vocabulary."""

    OPEN = frozenset("person city thing food noun word field".split())

    def __init__(
        self, rng: random.Random, unseen: bool = False, novelty: float | None = None
    ) -> None:
        self.rng, self.unseen = rng, unseen
        self.novelty = (0.15 if unseen else 0.5) if novelty is None else novelty

    def draw(self, pool: str) -> str:
        """A word of a pool, or now and then a novel one in its place."""
        r = self.rng
        if r.random() < self.novelty * _NOVEL.get(pool, 0.0):
            if pool in ("person", "city", "language"):
                return self.novel().capitalize()
            return self.novel() if r.random() < 0.9 else self.pseudo()
        seen, unseen = _SPLIT[pool]
        if pool not in self.OPEN:
            return r.choice(seen + unseen)
        return r.choice(unseen if self.unseen else seen)

    def either(self, seen: list[T], unseen: list[T]) -> list[T]:
        """Phrasings for training or those for evaluation."""
        return unseen if self.unseen else seen

    def several(self, pool: str, n: int) -> list[str]:
        out: list[str] = []
        while len(out) < n:
            w = self.draw(pool)
            if w not in out or self.rng.random() < 0.02:
                out.append(w)
        return out

    def _mine(self, make: Callable[[], str]) -> str:
        """Draw until the word is on the right side of what is held out."""
        while held_out(word := make()) is not self.unseen:
            pass
        return word

    def pseudo(self, low: int = 2, high: int = 4) -> str:
        """A word of syllables that is in no list."""
        r = self.rng
        return self._mine(lambda: "".join(r.choices(SYLLABLES, k=r.randint(low, high))))

    def novel(self) -> str:
        """One to five random pieces of the vocabulary, mostly small letters; a listed word where
        nothing novel is wanted."""
        r = self.rng
        if not self.novelty:
            return self.draw("word")

        def make() -> str:
            n = r.choices((1, 2, 3, 4, 5), (30, 38, 20, 9, 3))[0]
            x = r.random()
            word = "".join(r.choices(_MIXED if x < 0.2 else _LOWER, k=n))
            return word.upper() if x > 0.98 else word.capitalize() if x > 0.9 else word

        return self._mine(make)

    def marker(self) -> str:
        """A word that opens a sentence and means nothing."""
        word = self.novel() if self.rng.random() < 0.7 else self.draw("word")
        return word[:1].upper() + word[1:]

    def scrambled(self) -> str:
        """Letters, digits and marks in no order, as in keys and serial numbers."""
        r = self.rng

        def make() -> str:
            x = r.random()
            letters = _LETTERS.upper() if x < 0.3 else _LETTERS
            signs = letters * 2 + _DIGITS * 3
            signs += "_" if x < 0.5 else "-." if x < 0.6 else ""
            word = "".join(r.choices(signs, k=r.randint(3, 12)))
            return word.strip("_-.") or "x1"

        return self._mine(make)

    def any_word(self) -> str:
        r = self.rng
        x, novelty = r.random(), self.novelty
        if x < 0.84 * novelty:
            return self.novel()
        if x < novelty:
            return self.scrambled()
        return self.pseudo() if r.random() < 0.2 else self.draw("word")

    def name(self) -> str:
        r = self.rng
        first = self.draw("person").replace(".", ". ")
        if r.random() < 0.6:
            return first
        last = self.pseudo() if r.random() < 0.5 else self.novel()
        return f"{first} {last.capitalize()}"

    def place(self) -> str:
        r = self.rng
        x = r.random()
        if x < 0.78:
            return self.draw("city")
        if x < 0.9:
            return self.pseudo().capitalize()
        return f"{self.novel().capitalize()} {self.any_word().capitalize()}"

    def integer(self) -> int:
        r = self.rng
        return r.choice(
            [r.randint(1, 9), r.randint(2, 31), r.randint(10, 99), r.randint(100, 9999)]
        )

    def number(self) -> int:
        """A whole number of any length, to be copied, not to be reckoned with."""
        r = self.rng
        return self.integer() if r.random() < 0.8 else r.randint(10**3, 10 ** r.randint(4, 8))

    def decimal(self) -> float:
        return round(self.rng.uniform(0.1, 200), self.rng.choice([1, 1, 2]))

    def date(self) -> str:
        r = self.rng
        year, month, day = r.randint(1998, 2031), r.randint(1, 12), r.randint(1, 28)
        x = r.random()
        if x < 0.8:
            return f"{year}-{month:02d}-{day:02d}"
        if x < 0.88:
            return f"{day}.{month}.{year}"
        named = self.draw("month")
        return f"{day} {named} {year}" if x < 0.94 else f"{named} {day}"

    def clock(self) -> str:
        r = self.rng
        hour, minute = r.randint(0, 23), r.choice([0, 5, 10, 15, 20, 30, 40, 45])
        x = r.random()
        if x < 0.85:
            return f"{hour:02d}:{minute:02d}"
        if x < 0.92:
            return f"{hour % 12 + 1} {r.choice(['am', 'pm'])}"
        return f"{hour}:{r.randint(0, 59):02d}"

    def code(self) -> str:
        r = self.rng
        letters = "".join(r.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=r.randint(1, 3)))
        digits = "".join(r.choices("0123456789", k=r.randint(2, 5)))
        return r.choice(
            [f"{letters}-{digits}", f"{letters}{digits}", digits, f"{digits}-{letters}",
             self.scrambled()]
        )  # fmt: skip

    def email(self) -> str:
        r = self.rng
        user = self.draw("person").split(".")[-1].lower() if r.random() < 0.6 else self.any_word()
        return f"{user}@{self.any_word()}.{r.choice(['com', 'org', 'net', 'io', 'dev'])}"

    def path(self) -> str:
        r = self.rng
        folders = "/".join(self.any_word() for _ in range(r.choice([1, 1, 2, 2, 3, 4])))
        end = r.choice(["txt", "md", "py", "json", "csv", "log", "png", "jpg", "html", "toml"])
        root = r.choice(["/home/", "/tmp/", "src/", "docs/", "/var/", "/", "", "./"])
        return f"{root}{folders}" if r.random() < 0.1 else f"{root}{folders}.{end}"

    def folder(self) -> str:
        r = self.rng
        folders = "/".join(self.any_word() for _ in range(r.choice([1, 1, 2, 2, 3])))
        return (
            r.choice(["/home/", "/tmp/", "src/", "docs/", "/var/", "/", "", "./", "~/"]) + folders
        )

    def url(self) -> str:
        return (
            f"https://{self.any_word()}.{self.rng.choice(['com', 'org', 'net'])}/{self.any_word()}"
        )

    def phrase(self, low: int = 2, high: int = 4) -> str:
        r = self.rng
        if r.random() < 0.05:
            high += 6
        words = [self.any_word() for _ in range(r.randint(low, high))]
        if r.random() < 0.1:
            words = [w.capitalize() for w in words]
        return " ".join(words)

    def sentence(self) -> str:
        """A plain statement about somebody."""
        r = self.rng
        who, thing = self.draw("person").replace(".", ". "), self.draw("thing")
        return r.choice([
            f"{who} has a {self.draw('color')} {thing}.",
            f"{who} lives in {self.place()}.",
            f"{who} is a {self.draw('job')}.",
            f"The {thing} is in the {self.draw('thing')}.",
            f"The {self.draw('animal')} of {who} is called {self.pseudo().capitalize()}.",
            f"{who} likes {self.draw('food')}.",
            f"The {thing} of {who} weighs {self.integer()} kilos.",
            f"{who} met {self.draw('person')} on {self.draw('day')}.",
            f"{who} was born on {self.date()}.",
        ])  # fmt: skip

    def string(self, field: str) -> str:
        """A text value that suits a field's name, or any."""
        last = field.split("_")[-1]
        maker = _BY_FIELD.get(last)
        if maker is not None:
            return maker(self)
        kinds = (self.draw_word, self.phrase, self.code, self.name, self.place, self.pseudo)
        return self.rng.choice(kinds)()

    def draw_word(self) -> str:
        return self.any_word()


_BY_FIELD: dict[str, Callable[[Words], str]] = {
    "city": Words.place, "country": Words.place, "place": Words.place, "location": Words.place,
    "town": Words.place, "origin": Words.place, "destination": Words.place,
    "date": Words.date, "time": Words.clock, "email": Words.email, "path": Words.path,
    "file": Words.path, "folder": Words.path, "url": Words.url, "id": Words.code,
    "code": Words.code,
    "person": Words.name, "name": Words.name, "user": Words.name, "author": Words.name,
    "owner": Words.name, "message": lambda w: w.phrase(3, 6), "text": lambda w: w.phrase(3, 6),
    "body": lambda w: w.phrase(3, 7), "query": Words.phrase, "title": Words.phrase,
    "topic": Words.phrase, "note": lambda w: w.phrase(2, 6),
    "language": lambda w: w.draw("language"),
    "color": lambda w: w.draw("color"), "day": lambda w: w.draw("day"),
    "month": lambda w: w.draw("month"), "product": lambda w: w.draw("thing"),
    "item": lambda w: w.draw("thing"), "food": lambda w: w.draw("food"),
}  # fmt: skip
