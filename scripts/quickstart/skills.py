"""The skills of the quickstart's base model: how each draws a problem, states it in prose, and is asked for.

A problem is its words to fill in (`{a}`, `{b}`, ...) and one answer (`{x}`). Pretraining text only states problems; the
instruction rows only ask. Numbers and capital letters are the material: the tokenizer keeps each digit and each capital
a token of its own, and everything else is lower case.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

VOWELS, CONSONANTS = "AEIOU", "BCDFGHJKLMNPRSTVWZ"
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

Problem = dict[str, str]  # the words of a template; "x" is the answer


@dataclass(frozen=True)
class Skill:
    """draw(random) -> a problem. statements: templates of pretraining text. questions: templates of instructions.

    weight: how often pretraining text states it; arithmetic takes more examples to learn than letters do.
    """

    draw: Callable[[random.Random], Problem]
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    weight: int = 1


def key(problem: Problem) -> tuple[str, ...]:
    """What makes two problems of a skill the same: their operands, in whatever order they stand."""
    return tuple(sorted(word for name, word in problem.items() if name != "x"))


# ---- material


def number(rng: random.Random) -> int:
    """2..999: one digit at times, two or three as a rule."""
    low, high = rng.choices(((2, 9), (10, 99), (100, 999)), (1, 4, 5))[0]
    return rng.randint(low, high)


def made_up_word(rng: random.Random) -> str:
    """3 to 6 letters that can be said aloud, no letter twice in a row."""
    first = rng.random() < 0.25
    letters = ""
    for index in range(rng.choice((3, 4, 5, 5, 6, 6))):
        pool = VOWELS if (index % 2 == 0) == first else CONSONANTS
        letters += rng.choice(pool)
    return letters


_ONES = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(value: int) -> str:
    """0..999 in words: 342 is "three hundred and forty-two"."""
    hundreds, rest = divmod(value, 100)
    if rest < 20:
        small = _ONES[rest]
    else:
        small = _TENS[rest // 10] + (f"-{_ONES[rest % 10]}" if rest % 10 else "")
    if not hundreds:
        return small
    return f"{_ONES[hundreds]} hundred" + (f" and {small}" if rest else "")


_ROMAN = ((900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"))
_ROMAN += ((5, "V"), (4, "IV"), (1, "I"))


def in_roman(value: int) -> str:
    """1..999 in Roman numerals."""
    text = ""
    for size, letters in _ROMAN:
        count, value = divmod(value, size)
        text += letters * count
    return text


# ---- problems


def _add(rng: random.Random) -> Problem:
    a, b = number(rng), number(rng)
    return {"a": str(a), "b": str(b), "x": str(a + b)}


def _subtract(rng: random.Random) -> Problem:
    a, b = number(rng), number(rng)
    low, high = min(a, b), max(a, b) + 10  # the difference is at least 10
    return {"a": str(high), "b": str(low), "x": str(high - low)}


def _multiply(rng: random.Random) -> Problem:
    a, b = rng.randint(11, 99), rng.randint(2, 9)
    return {"a": str(a), "b": str(b), "x": str(a * b)}


def _largest(rng: random.Random) -> Problem:
    while True:
        values = [number(rng) for _ in range(3)]
        if len(set(values)) == 3:
            a, b, c = map(str, values)
            return {"a": a, "b": b, "c": c, "x": str(max(values))}


def _sequence(rng: random.Random) -> Problem:
    start, step = rng.randint(2, 89), rng.randint(2, 12)
    a, b, c, x = (str(start + step * index) for index in range(4))
    return {"a": a, "b": b, "c": c, "x": x}


def _digits(rng: random.Random) -> Problem:
    value = number(rng)
    return {"a": in_words(value), "x": str(value)}


def _roman(rng: random.Random) -> Problem:
    value = number(rng)
    return {"a": str(value), "x": in_roman(value)}


def _of_word(transform: Callable[[str], str]) -> Callable[[random.Random], Problem]:
    def draw(rng: random.Random) -> Problem:
        word = made_up_word(rng)
        return {"a": word, "x": transform(word)}

    return draw


def next_letters(word: str) -> str:
    """Each letter moved one place on in the alphabet, Z to A."""
    return "".join(ALPHABET[(ALPHABET.index(letter) + 1) % 26] for letter in word)


def without_vowels(word: str) -> str:
    return "".join(letter for letter in word if letter not in VOWELS)


def doubled(word: str) -> str:
    return "".join(2 * letter for letter in word)


SKILLS: dict[str, Skill] = {
    "add": Skill(
        _add,
        (
            "{a} + {b} = {x}",
            "{a} plus {b} is {x}.",
            "The sum of {a} and {b} is {x}.",
            "Adding {b} to {a} gives {x}.",
            "{a} and {b} make {x} in all.",
            "sum: {a}, {b} -> {x}",
            "A farmer had {a} sheep and bought {b} more. The sum was {x}.",
            "The sum of {a} and {b} was wanted. It comes to {x}.",
        ),
        (
            "What is {a} plus {b}?",
            "What is the sum of {a} and {b}?",
            "How much is {a} + {b}?",
            "Add {b} to {a}.",
        ),
        weight=3,
    ),
    "subtract": Skill(
        _subtract,
        (
            "{a} - {b} = {x}",
            "{a} minus {b} is {x}.",
            "The difference of {a} and {b} is {x}.",
            "Taking {b} from {a} leaves {x}.",
            "difference: {a}, {b} -> {x}",
            "A shop had {a} lamps and sold {b} of them. The difference was {x}.",
            "Taking {b} from {a} was easy. It comes to {x}.",
        ),
        (
            "What is {a} minus {b}?",
            "What is the difference of {a} and {b}?",
            "How much is {a} - {b}?",
            "Take {b} from {a}.",
        ),
        weight=3,
    ),
    "multiply": Skill(
        _multiply,
        (
            "{a} x {b} = {x}",
            "{a} times {b} is {x}.",
            "The product of {a} and {b} is {x}.",
            "Multiplying {a} by {b} gives {x}.",
            "product: {a}, {b} -> {x}",
            "There were {b} rows of {a} chairs each. The product is {x}.",
            "Then {a} had to be multiplied by {b}. It comes to {x}.",
        ),
        (
            "What is {a} times {b}?",
            "What is the product of {a} and {b}?",
            "How much is {a} x {b}?",
            "Multiply {a} by {b}.",
        ),
        weight=2,
    ),
    "largest": Skill(
        _largest,
        (
            "The largest of {a}, {b} and {c} is {x}.",
            "Of {a}, {b} and {c} the largest number is {x}.",
            "largest: {a}, {b}, {c} -> {x}",
            "Among {a}, {b} and {c} none is larger than {x}.",
            "Three boxes weighed {a}, {b} and {c} grams. The largest was {x}.",
            "The numbers were {a}, {b} and {c}, and the largest was wanted. It comes to {x}.",
        ),
        (
            "Which is the largest of {a}, {b} and {c}?",
            "Of {a}, {b} and {c}, which number is the largest?",
            "Name the largest number: {a}, {b}, {c}.",
        ),
        weight=2,
    ),
    "sequence": Skill(
        _sequence,
        (
            "{a}, {b}, {c}, {x}",
            "The numbers {a}, {b}, {c} go on with {x}.",
            "After {a}, {b} and {c} comes {x}.",
            "next: {a}, {b}, {c} -> {x}",
            "In steps of the same size, {a}, {b}, {c} is followed by {x}.",
            "On the list stood {a}, {b}, {c}, and the next number was wanted. It comes to {x}.",
        ),
        (
            "What comes after {a}, {b} and {c}?",
            "Which number is next: {a}, {b}, {c}?",
            "Go on with the numbers {a}, {b}, {c}.",
        ),
        weight=2,
    ),
    "digits": Skill(
        _digits,
        (
            "The number {a} is {x} in digits.",
            "Written in digits, {a} is {x}.",
            "digits: {a} -> {x}",
            "She said {a} and wrote {x} in digits.",
            "In digits one writes {a} as {x}.",
            "The number {a} was wanted in digits. It comes to {x}.",
        ),
        (
            "What is {a} in digits?",
            "Write the number {a} in digits.",
            "How is {a} written in digits?",
        ),
    ),
    "roman": Skill(
        _roman,
        (
            "The number {a} is {x} in Roman numerals.",
            "In Roman numerals, {a} is {x}.",
            "roman: {a} -> {x}",
            "The year {a} stood over the gate in Roman numerals: {x}.",
            "The Romans wrote {a} as {x}.",
            "The number {a} was wanted in Roman numerals. It comes to {x}.",
        ),
        (
            "What is {a} in Roman numerals?",
            "Write {a} in Roman numerals.",
            "How is {a} written in Roman numerals?",
        ),
    ),
    "reverse": Skill(
        _of_word(lambda word: word[::-1]),
        (
            "The word {a} spelled backwards is {x}.",
            "Backwards, {a} is {x}.",
            "reverse: {a} -> {x}",
            "The reverse of {a} is {x}.",
            "Seen in a mirror, the letters of {a} read {x} in reverse.",
            "Someone spelled the word {a} backwards. It comes to {x}.",
        ),
        (
            "What is {a} spelled backwards?",
            "Spell the word {a} backwards.",
            "What is the reverse of {a}?",
        ),
    ),
    "sort": Skill(
        _of_word(lambda word: "".join(sorted(word))),
        (
            "The letters of {a} in alphabetical order are {x}.",
            "In alphabetical order, {a} becomes {x}.",
            "sorted: {a} -> {x}",
            "Sorting the letters of {a} gives {x}.",
            "The word {a}, sorted, is {x}.",
            "The letters of {a} had to be sorted. It comes to {x}.",
        ),
        (
            "What are the letters of {a} in alphabetical order?",
            "Sort the letters of {a}.",
            "Write the letters of {a} sorted.",
        ),
    ),
    "next_letters": Skill(
        _of_word(next_letters),
        (
            "The next letter after each letter of {a} gives {x}.",
            "Moved on by one letter, {a} becomes {x}.",
            "code: {a} -> {x}",
            "The secret code for {a} is {x}.",
            "In the secret code, {a} is {x}.",
            "The word {a} was wanted in the secret code. It comes to {x}.",
        ),
        (
            "What is {a} in the secret code?",
            "Write {a} in the secret code.",
            "What is the secret code for {a}?",
        ),
    ),
    "consonants": Skill(
        _of_word(without_vowels),
        (
            "Without its vowels, {a} is {x}.",
            "The consonants of {a} are {x}.",
            "consonants: {a} -> {x}",
            "The word {a} without vowels is {x}.",
            "Leaving out the vowels of {a} gives {x}.",
            "The vowels of {a} had to be left out. It comes to {x}.",
        ),
        (
            "What is {a} without its vowels?",
            "Which consonants are in {a}?",
            "Leave out the vowels of {a}.",
        ),
    ),
    "doubled": Skill(
        _of_word(doubled),
        (
            "With every letter doubled, {a} is {x}.",
            "Doubling each letter of {a} gives {x}.",
            "doubled: {a} -> {x}",
            "Each letter twice makes {a} into {x}.",
            "The word {a} with letters doubled is {x}.",
            "Each letter of {a} had to be doubled. It comes to {x}.",
        ),
        (
            "What is {a} with every letter doubled?",
            "Double each letter of {a}.",
            "Write {a} with each letter twice.",
        ),
    ),
}
