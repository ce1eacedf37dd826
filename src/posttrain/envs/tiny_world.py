"""A fictional world from a seed: people, places and organisations with invented names, one passage each, and questions
whose answers stand in the passages only. Small enough to learn on a laptop; nothing in it can be known beforehand.

Names are drawn from two disjoint sets by a hash of the name itself, so that no entity asked about in evaluation occurs
in any training question or training world, whatever the seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Literal

Split = Literal["train", "eval"]

CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"
SYLLABLES = tuple(c + v for c in CONSONANTS for v in VOWELS)
ORGANISATION_KINDS = ("Works", "Guild", "Institute", "Press")
EVAL_SHARE = 4  # one name in four is reserved for evaluation


@dataclass(frozen=True, slots=True)
class Entity:
    """One thing of the world: its kind, its name, and its facts as relation -> name of another entity."""

    kind: str
    name: str
    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class Question:
    """A question about `subject`; `path` is the chain of relations from it to the answer (one hop each)."""

    text: str
    answer: str
    subject: str
    path: tuple[str, ...]
    bridge: str | None = None  # the entity between the hops


@dataclass(frozen=True, slots=True)
class World:
    """Entities by name, and the questions that can be asked of them."""

    entities: dict[str, Entity]
    questions: tuple[Question, ...]

    def passages(self) -> list[dict[str, str]]:
        """Rows {"id", "contents"}: the first line of `contents` is the quoted title."""
        return [
            {"id": name, "contents": f'"{name}"\n{PASSAGES[entity.kind].format(name=name, **entity.facts)}'}
            for name, entity in self.entities.items()
        ]


PASSAGES = {
    "person": "{name} was born in {birthplace} and works for {employer}.",
    "place": "{name} lies in the region of {region}. The mayor of {name} is {mayor}.",
    "organisation": "{name} is based in {seat}. {name} was founded by {founder}.",
}
ONE_HOP = {
    ("person", "birthplace"): "Where was {s} born?",
    ("person", "employer"): "Who does {s} work for?",
    ("place", "region"): "Which region is {s} in?",
    ("place", "mayor"): "Who is the mayor of {s}?",
    ("organisation", "seat"): "Where is {s} based?",
    ("organisation", "founder"): "Who founded {s}?",
}
TWO_HOP = {
    ("person", "birthplace", "region"): "Which region was {s} born in?",
    ("person", "birthplace", "mayor"): "Who is the mayor of the birthplace of {s}?",
    ("person", "employer", "seat"): "Where is the employer of {s} based?",
    ("person", "employer", "founder"): "Who founded the employer of {s}?",
    ("organisation", "seat", "mayor"): "Who is the mayor of the seat of {s}?",
    ("organisation", "founder", "birthplace"): "Where was the founder of {s} born?",
}


def generate(seed: int, split: Split, *, people: int = 120, places: int = 60, organisations: int = 60) -> World:
    """A world of the given size. The same arguments give the same world, on every machine."""
    rng = random.Random(f"world/{seed}/{split}")
    taken: set[str] = set()
    person_names = _names(rng, people, _person, split, taken)
    place_names = _names(rng, places, _place, split, taken)
    organisation_names = _names(rng, organisations, _organisation, split, taken)
    regions = _names(rng, max(2, places // 4), _place, split, taken)
    entities: dict[str, Entity] = {}
    for name in person_names:
        facts = {"birthplace": rng.choice(place_names), "employer": rng.choice(organisation_names)}
        entities[name] = Entity("person", name, facts)
    for name in place_names:
        entities[name] = Entity("place", name, {"region": rng.choice(regions), "mayor": rng.choice(person_names)})
    for name in organisation_names:
        facts = {"seat": rng.choice(place_names), "founder": rng.choice(person_names)}
        entities[name] = Entity("organisation", name, facts)
    return World(entities, tuple(_questions(entities)))


def _questions(entities: dict[str, Entity]) -> Iterator[Question]:
    for name, entity in entities.items():
        for (kind, relation), text in ONE_HOP.items():
            if kind == entity.kind:
                yield Question(text.format(s=name), entity.facts[relation], name, (relation,))
        for (kind, first, second), text in TWO_HOP.items():
            if kind == entity.kind:
                bridge = entity.facts[first]
                yield Question(text.format(s=name), entities[bridge].facts[second], name, (first, second), bridge)


def _names(
    rng: random.Random, count: int, make: Callable[[random.Random], str], split: Split, taken: set[str]
) -> list[str]:
    names: list[str] = []
    while len(names) < count:
        name = make(rng)
        if name not in taken and split_of(name) == split:
            taken.add(name)
            names.append(name)
    return names


def split_of(name: str) -> Split:
    """Which of the two disjoint sets of names a name belongs to."""
    digest = blake2b(name.encode(), digest_size=2).digest()
    return "eval" if int.from_bytes(digest, "big") % EVAL_SHARE == 0 else "train"


def _word(rng: random.Random, syllables: int) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(syllables)).capitalize()


def _person(rng: random.Random) -> str:
    return f"{_word(rng, 2)} {_word(rng, 2)}"


def _place(rng: random.Random) -> str:
    return _word(rng, 3)


def _organisation(rng: random.Random) -> str:
    return f"{_word(rng, 2)} {rng.choice(ORGANISATION_KINDS)}"


@lru_cache(maxsize=8)
def _both_worlds(seed: int) -> dict[Split, World]:
    return {"train": generate(seed, "train"), "eval": generate(seed, "eval")}


def passages(seed: int) -> list[dict[str, str]]:
    """The corpus of one seed, rows {"id", "contents"}: training world and evaluation world together."""
    worlds = _both_worlds(seed)
    return worlds["train"].passages() + worlds["eval"].passages()


def train_rows(seed: int) -> list[dict[str, object]]:
    """Every question of the training world as rows {"id", "question", "answer", "data_source", ...}."""
    return _rows(_both_worlds(seed)["train"].questions, "train")


def eval_rows(seed: int, per_kind: int = 128) -> list[dict[str, object]]:
    """`per_kind` one-hop and as many two-hop questions of the evaluation world, drawn by the seed."""
    questions = list(_both_worlds(seed)["eval"].questions)
    random.Random(f"eval/{seed}").shuffle(questions)
    chosen = [q for hops in (1, 2) for q in [q for q in questions if len(q.path) == hops][:per_kind]]
    return _rows(chosen, "eval")


def _rows(questions: tuple[Question, ...] | list[Question], split: Split) -> list[dict[str, object]]:
    return [
        {
            "id": f"{split}/{number}",
            "question": question.text,
            "answer": question.answer,
            "data_source": f"{len(question.path)}-hop",
            "subject": question.subject,
            "bridge": question.bridge,
        }
        for number, question in enumerate(questions)
    ]
