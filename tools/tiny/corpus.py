"""Generator of the bundled model's training and held-out text.

Every document is drawn from the word lists, plots and facts of `stories.py` and from the addition
task of `tinkex.models.addition`. The split is by rule, not by chance: a document whose combination
of template and entities hashes to the held-out side is only ever written for the held-out text, and
the numbers of a held-out addition problem are never added, subtracted or compared in the training
text.

Run ``PYTHONPATH=src python -m tools.tiny.corpus --documents 20`` to read some of it.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from tools.tiny import stories as st

from tinkex.models import addition

BOS, EOS, PAD, END = "<|bos|>", "<|eos|>", "<|pad|>", "<|end|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (BOS, EOS, PAD, SYSTEM, USER, ASSISTANT, END)

_HELD_OUT_ONE_IN = 20
_CHUNK = 500
_PLURALS = {"mouse": "mice", "deer": "deer", "fox": "foxes", "puppy": "puppies", "pony": "ponies"}


@dataclass(frozen=True)
class Mix:
    """Shares of each kind of document in the text, and the difficulty of its bare sums.

    Attributes:
        weights: Relative number of documents of each kind.
        carry_share: Share of the bare sums (``37+45=82``) drawn from all problems; the others are
            drawn from the problems without a carry.
    """

    weights: dict[str, float] = field(
        default_factory=lambda: {
            "story": 0.24,
            "story_questions": 0.14,
            "story_chat": 0.08,
            "town": 0.08,
            "knowledge": 0.07,
            "chat": 0.06,
            "small_sums": 0.05,
            "worded_sums": 0.09,
            "worked_sums": 0.06,
            "told_sums": 0.06,
            "number_facts": 0.03,
            "bare_sums": 0.04,
        }
    )
    carry_share: float = 0.0


def held_out(*combination: str) -> bool:
    """Tell on which side of the split a combination of template and entities falls."""
    return zlib.crc32("|".join(combination).encode()) % _HELD_OUT_ONE_IN == 0


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _pronouns(girl: bool, prefix: str = "") -> dict[str, str]:
    he, him, his = ("she", "her", "her") if girl else ("he", "him", "his")
    forms = {
        f"{prefix}he": he,
        f"{prefix}him": him,
        f"{prefix}his": his,
        f"{prefix}kid": "girl" if girl else "boy",
    }
    return forms | {_capital(key): _capital(value) for key, value in forms.items()}


def _person(rng: random.Random) -> tuple[str, bool]:
    girl = rng.random() < 0.5
    return rng.choice(st.GIRLS if girl else st.BOYS), girl


def _town_words(town: st.Town) -> dict[str, str]:
    words = {
        "name": town.name,
        "town": town.name,
        "river": town.river,
        "flag": town.flag,
        "craft": town.craft,
    }
    words |= {"tower": town.tower, "mayor": town.mayor, "festival": town.festival}
    return words | {"a_flag": _article(town.flag)}


def _story_words(rng: random.Random, plot: st.Plot) -> dict[str, str]:
    hero, hero_girl = _person(rng)
    friend, friend_girl = _person(rng)
    while friend == hero:
        friend, friend_girl = _person(rng)
    toy, colour = rng.choice(st.TOYS), rng.choice(st.COLOURS)
    thing = f"{rng.choice((colour, rng.choice(st.SIZES)))} {toy}"
    place, place2 = rng.sample(st.PLACES, 2)
    animal, animal2 = rng.sample(st.ANIMALS, 2)
    season = rng.randrange(2 if plot.name == "garden" else 4)
    words = {
        "hero": hero,
        "friend": friend,
        "toy": toy,
        "thing": thing,
        "a_thing": _article(thing),
        "A_toy": _capital(_article(toy)),
        "colour": colour,
        "a_colour": _article(colour),
        "place": place,
        "place2": place2,
        "animal": animal,
        "animal2": animal2,
        "animal_plural": _PLURALS.get(animal, animal + "s"),
        "spot": rng.choice(st.SPOTS),
        "snack": rng.choice(st.SNACKS),
        "kin": rng.choice(st.FAMILY),
        "weather": rng.choice(st.WEATHER),
        "mood": rng.choice(st.MOODS),
        "day": rng.choice(st.DAYS),
        "season": st.SEASONS[season],
        "season2": st.SEASONS[(season + 1) % 4],
        "num": rng.choice(st.NUMBER_WORDS),
        "petname": rng.choice(st.PETNAMES),
        "food_left": rng.choice(st.LEFTOVERS),
        "toy_bag": rng.choice(st.BAGS),
        "a_thing_cloth": rng.choice(st.CLOTHS),
        "a_thing_tool": rng.choice(st.TOOLS),
    }
    words |= _pronouns(hero_girl) | _pronouns(friend_girl, "f") | _town_words(rng.choice(st.TOWNS))
    words |= {slot: rng.choice(values) for slot, values in plot.slots.items() if slot != "animal"}
    words |= {
        _capital(slot): words[slot].title()
        for slot in ("toy", "snack", "animal", "animal2", "num", *plot.slots)
        if slot in words
    }
    return words


@dataclass(frozen=True)
class _Story:
    title: str
    text: str
    words: dict[str, str]
    plot: st.Plot


def _story(rng: random.Random, held: bool) -> _Story:
    plot = rng.choice(st.PLOTS)
    words = _story_words(rng, plot)
    key = "toy" if plot.key == "thing" else plot.key
    while held_out(plot.name, words["hero"], words[key]) is not held:
        words = _story_words(rng, plot)
    beats = [rng.choice(st.OPENINGS), *(rng.choice(beat) for beat in plot.beats)]
    if rng.random() < 0.6:
        beats.append(rng.choice(st.CLOSINGS))
    sentences = [_capital(beat.format_map(words)) for beat in beats if beat]
    if rng.random() < 0.35:
        cut = rng.randrange(3, len(sentences) - 2)
        text = " ".join(sentences[:cut]) + "\n" + " ".join(sentences[cut:])
    else:
        text = " ".join(sentences)
    return _Story(_capital(rng.choice(plot.titles).format_map(words)), text, words, plot)


_FIELD = re.compile(r"{(\w+)}")


def _answerable(story: _Story) -> list[tuple[str, str]]:
    """Keep the questions whose answer the story really tells."""
    pairs = []
    for question, reply in story.plot.questions:
        told = all(
            story.words[slot].removeprefix("a ").removeprefix("an ") in story.text
            for slot in _FIELD.findall(reply)
        )
        if told:
            pairs.append(
                (question.format_map(story.words), _capital(reply.format_map(story.words)))
            )
    return pairs


def _turn(role: str, content: str) -> str:
    return f"{role}{content}{END}"


def _chat(rng: random.Random, turns: list[tuple[str, str]]) -> str:
    system = _turn(SYSTEM, rng.choice(st.SYSTEM_LINES)) if rng.random() < 0.25 else ""
    return system + "".join(_turn(USER, asked) + _turn(ASSISTANT, said) for asked, said in turns)


def _lines(rng: random.Random, pairs: list[tuple[str, str]]) -> str:
    """Write questions and answers as a chat or as plain lines."""
    style = rng.random()
    if style < 0.4:
        return _chat(rng, pairs)
    if style < 0.7:
        return (
            "\n".join(f"Question: {question}\nAnswer: {reply}" for question, reply in pairs) + "\n"
        )
    return "\n".join(f"{question} {reply}" for question, reply in pairs) + "\n"


def story(rng: random.Random, held: bool, mix: Mix) -> str:
    """Write a story, often with its title."""
    told = _story(rng, held)
    return f"{told.title}\n{told.text}\n" if rng.random() < 0.5 else told.text + "\n"


def story_questions(rng: random.Random, held: bool, mix: Mix) -> str:
    """Write a story and questions that it answers."""
    told = _story(rng, held)
    pairs = _answerable(told)
    rng.shuffle(pairs)
    pairs = pairs[: rng.randint(1, 3)]
    if rng.random() < 0.25 and pairs:
        (question, reply), *rest = pairs
        return _chat(rng, [(f"{told.text}\n{question}", reply), *rest])
    return (
        told.text
        + "\n"
        + "".join(f"Question: {question}\nAnswer: {reply}\n" for question, reply in pairs)
    )


def story_chat(rng: random.Random, held: bool, mix: Mix) -> str:
    """Write a chat in which a story is asked for and told."""
    told = _story(rng, held)
    key = "toy" if told.plot.key == "thing" else told.plot.key
    value = told.words[key]
    topic = {
        "animal": _article(value),
        "toy": _article(value),
        "dish": _article(value),
        "project": _article(value),
    }
    words = told.words | {"topic": topic.get(key, value if key != "skill" else f"how to {value}")}
    turns = [(rng.choice(st.STORY_REQUESTS).format_map(words), told.text)]
    if rng.random() < 0.3:
        turns += _answerable(told)[:1]
    return _chat(rng, turns)


def _town_pair(rng: random.Random, held: bool) -> tuple[str, str]:
    while True:
        town, fact = rng.choice(st.TOWNS), rng.choice(list(st.TOWN_FACTS))
        question = rng.choice(st.TOWN_FACTS[fact][1])
        if held_out(town.name, question) is held:
            words = _town_words(town)
            return question.format_map(words), _capital(
                rng.choice(st.TOWN_FACTS[fact][2]).format_map(words)
            )


def town(rng: random.Random, held: bool, mix: Mix) -> str:
    """Write what is true of one town, or questions about several towns."""
    if held or rng.random() < 0.5:
        return _lines(rng, [_town_pair(rng, held) for _ in range(rng.randint(1, 3))])
    place = rng.choice(st.TOWNS)
    facts = rng.sample(list(st.TOWN_FACTS), rng.randint(2, 5))
    words = _town_words(place)
    return (
        " ".join(_capital(rng.choice(st.TOWN_FACTS[fact][0]).format_map(words)) for fact in facts)
        + "\n"
    )


def _animal_pair(rng: random.Random) -> tuple[str, str, str]:
    animal = rng.choice(st.ANIMALS)
    home, diet, legs = st.ANIMAL_FACTS[animal]
    asked, said = rng.choice(st.ANIMAL_QUESTIONS)
    question = rng.choice(asked)
    words = {"animal": animal, "home": home, "diet": diet, "legs": legs}
    reply = rng.choice(said).format_map(words)
    return animal, question.format_map(words), reply


def _common_pair(rng: random.Random) -> tuple[str, str, str]:
    kind = rng.randrange(4)
    if kind == 0:
        pair = rng.choice(st.OPPOSITES)
        first, second = pair if rng.random() < 0.5 else pair[::-1]
        return first, f"What is the opposite of {first}?", f"The opposite of {first} is {second}."
    if kind == 1:
        thing, colour = rng.choice(st.THING_COLOURS)
        return thing, f"What colour is {thing}?", f"{_capital(thing)} is {colour}."
    names, unit = (st.DAYS, "day") if kind == 2 else (st.MONTHS, "month")
    i = rng.randrange(len(names))
    if rng.random() < 0.5:
        return (
            names[i],
            f"Which {unit} comes after {names[i]}?",
            f"{names[(i + 1) % len(names)]} comes after {names[i]}.",
        )
    return (
        names[i],
        f"Which {unit} comes before {names[i]}?",
        f"{names[i - 1]} comes before {names[i]}.",
    )


def _knowledge_pair(rng: random.Random, held: bool) -> tuple[str, str]:
    while True:
        entity, question, reply = rng.choice((_animal_pair, _common_pair))(rng)
        if held_out(entity, question) is held:
            return question, reply


def knowledge(rng: random.Random, held: bool, mix: Mix) -> str:
    """Write questions about animals, opposites, colours, days and months."""
    return _lines(rng, [_knowledge_pair(rng, held) for _ in range(rng.randint(1, 3))])


def chat(rng: random.Random, held: bool, mix: Mix) -> str:
    """Write small talk, with a question of another kind in between."""
    while True:
        user = rng.choice(st.GIRLS + st.BOYS)
        asked, said = rng.choice(st.GREETINGS)
        if held_out(user, asked) is held:
            break
    if "{user}" not in asked:
        asked = rng.choice(
            (f"I am {user}. {asked}", f"{asked} My name is {user}.", f"{user} here. {asked}")
        )
    turns = [(asked.format(user=user), said.format(user=user))]
    more = rng.random()
    if more < 0.3:
        turns.append(_town_pair(rng, held))
    elif more < 0.6:
        turns.append(_knowledge_pair(rng, held))
    return _chat(rng, turns)


@lru_cache(maxsize=4)
def _problems(held: bool, simple: bool) -> tuple[tuple[int, int], ...]:
    problems = addition.held_out_problems() if held else addition.training_problems()
    return tuple(
        (a, b) for a, b in problems if not simple or (a % 10 + b % 10 < 10 and a + b < 100)
    )


def _pair(rng: random.Random, held: bool) -> tuple[int, int]:
    return rng.choice(_problems(held, simple=False))


def small_sums(rng: random.Random, held: bool, mix: Mix) -> str:
    """Write sums of numbers up to ten, which the task leaves out."""
    lines = []
    style = rng.randrange(4)
    for _ in range(rng.randint(2, 6)):
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        lines.append(
            (
                f"{a}+{b}={a + b}",
                f"{a} plus {b} is {a + b}.",
                f"{a} and {b} make {a + b}.",
                f"{a + b} minus {a} is {b}.",
            )[style]
        )
    return "\n".join(lines) + "\n"


def _worded(rng: random.Random, a: int, b: int) -> tuple[str, str]:
    total = a + b
    question = rng.choice(
        (
            f"What is {a} plus {b}?",
            f"How much is {a} plus {b}?",
            f"Can you add {a} and {b}?",
            f"What do {a} and {b} make?",
        )
    )
    reply = rng.choice(
        (
            f"{a} plus {b} is {total}.",
            f"{a} and {b} make {total}.",
            f"The sum of {a} and {b} is {total}.",
        )
    )
    return question, reply


def worded_sums(rng: random.Random, held: bool, mix: Mix) -> str:
    """Write two-digit sums in words, as questions and answers."""
    return _lines(rng, [_worded(rng, *_pair(rng, held)) for _ in range(rng.randint(1, 4))])


def _worked(a: int, b: int) -> str:
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    text = f"Add {a} and {b}. The ones are {a % 10} and {b % 10}, and they make {ones}. "
    if ones >= 10:
        text += (
            f"Write {ones - 10} and carry 1. The tens are {a // 10} and {b // 10}, and with 1 "
            f"they make {tens + 1}. "
        )
    else:
        text += f"Write {ones}. The tens are {a // 10} and {b // 10}, and they make {tens}. "
    return text + f"The sum is {a + b}."


def worked_sums(rng: random.Random, held: bool, mix: Mix) -> str:
    """Write two-digit sums step by step, with the carry."""
    texts = [_worked(*_pair(rng, held)) for _ in range(rng.randint(1, 2))]
    return "\n".join(texts) + "\n"


def told_sums(rng: random.Random, held: bool, mix: Mix) -> str:
    """Write two-digit sums as little stories."""
    (name, girl), (other, _) = _person(rng), _person(rng)
    while other == name:
        other, _ = _person(rng)
    a, b = _pair(rng, held)
    things, he = rng.choice(st.COUNTABLES), "she" if girl else "he"
    story_text = rng.choice(
        (
            f"{name} has {a} {things}. {other} gives {'her' if girl else 'him'} {b} more.",
            f"{name} found {a} {things} in the morning and {b} {things} in the evening.",
            f"There were {a} {things} in a box, and {name} put in {b} more.",
            f"{name} had {a} {things}, and {other} had {b}. They put them together.",
            f"On {rng.choice(st.DAYS)}, {name} counted {a} {things}. Then {he} counted {b} more.",
        )
    )
    ending = rng.choice(
        (
            f" Now there are {a + b} {things}.",
            f" That makes {a + b} {things}.",
            f"\nQuestion: How many {things} are there?\nAnswer: There are {a + b} {things}.",
        )
    )
    return story_text + ending + "\n"


def number_facts(rng: random.Random, held: bool, mix: Mix) -> str:
    """Write differences and comparisons of two-digit numbers."""
    a, b = _pair(rng, held)
    if rng.random() < 0.5:
        return _lines(rng, [(f"What is {a + b} minus {a}?", f"{a + b} minus {a} is {b}.")])
    if a == b:
        return _lines(rng, [(f"Is {a} larger than {b}?", "No, they are the same.")])
    return _lines(
        rng, [(f"Which number is larger, {a} or {b}?", f"{max(a, b)} is larger than {min(a, b)}.")]
    )


def bare_sums(rng: random.Random, held: bool, mix: Mix) -> str:
    """Write two-digit sums in the notation of the task, mostly those without a carry."""
    count = rng.randint(1, 8)
    problems = [
        rng.choice(_problems(held, simple=rng.random() >= mix.carry_share)) for _ in range(count)
    ]
    return "".join(addition.prompt(a, b) + addition.answer(a, b) for a, b in problems)


_KINDS: dict[str, Callable[[random.Random, bool, Mix], str]] = {
    kind.__name__: kind
    for kind in (
        story,
        story_questions,
        story_chat,
        town,
        knowledge,
        chat,
        small_sums,
        worded_sums,
        worked_sums,
        told_sums,
        number_facts,
        bare_sums,
    )
}
_NUMBER = re.compile(r"\d+")
_VOWEL = re.compile(r"\b([Aa])(?= [Oo]wl)")


def leaks(document: str) -> bool:
    """Tell whether neighbouring numbers of a text are a held-out problem whose sum the text also
    names later.
    """
    numbers = [int(digits) for digits in _NUMBER.findall(document)]
    for i, (a, b) in enumerate(itertools.pairwise(numbers)):
        if addition.is_held_out(a, b) and a + b in numbers[i + 2 :]:
            return True
    return False


def _chunk(job: tuple[int, int, int, bool, Mix]) -> list[str]:
    seed, index, count, held, mix = job
    rng = random.Random(f"{seed} {index} {held}")
    kinds = [kind for kind in mix.weights if not (held and kind == "small_sums")]
    weights = [mix.weights[kind] for kind in kinds]
    texts: list[str] = []
    while len(texts) < count:
        text = _VOWEL.sub(r"\1n", _KINDS[rng.choices(kinds, weights)[0]](rng, held, mix))
        if held or not leaks(text):
            texts.append(text)
    return texts


def documents(seed: int, count: int, held: bool, mix: Mix, processes: int = 1) -> list[str]:
    """Write documents; the same arguments always give the same text.

    Args:
        seed: Seed of the text.
        count: How many documents to write.
        held: Whether to write the held-out side of the split.
        mix: How much of which kind.
        processes: How many processes share the work; the text does not depend on it.

    Returns:
        The documents, without begin and end tokens.
    """
    jobs = [(seed, i, min(_CHUNK, count - i), held, mix) for i in range(0, count, _CHUNK)]
    if processes <= 1:
        chunks = [_chunk(job) for job in jobs]
    else:
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            chunks = pool.map(_chunk, jobs, chunksize=4)
    return [text for chunk in chunks for text in chunk]


def main() -> None:
    """Print some of the text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--held-out", action="store_true")
    options = parser.parse_args()
    for text in documents(options.seed, options.documents, options.held_out, Mix()):
        print(text)
        print("-" * 20)


if __name__ == "__main__":
    main()
