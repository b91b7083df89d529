"""Small talk: greetings, thanks, questions about the model, and questions that it can't answer.

The six tasks have a few wordings each; `loose` and `loose2` use others, so that only questions
outside the tasks count as unknown. Some texts lack capitals or punctuation, as typed texts do.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from .examples import CITIES, NAMES, TAUGHT, Example, Form, make_example, split_of, words
from .tools import NO_TOOL, SYLLABLES, some_tools

GREETING = "Hello! I am a tiny demo model. I know sums, JSON records and little stories."
THANKS = "You are welcome!"
GOODBYE = "Goodbye!"
ABOUT = "I am a tiny demo model. I know sums, JSON records, little stories and a few tools."
HELP = "Try: What is 3 + 4? Or: Tell a story about Ana, a cat and a red ball."
UNKNOWN = "I do not know that. Try: What is 3 + 4?"
UNKNOWN_STORY = (
    "I need a name, an animal and a thing. Try: Tell a story about Ana, a cat and a red ball."
)
UNKNOWN_JSON = "I need a person. Try: Write as JSON: Ana is a baker, 30 years old."


class Talk(NamedTuple):
    """Texts with the same answer: each opening, alone or with each ending."""

    answer: str
    thought: str
    openings: tuple[str, ...]
    endings: tuple[str, ...]


def _endings(parts: Sequence[str], names: str = "model | tiny | friend | bot") -> tuple[str, ...]:
    """Return endings that begin with an optional name and go on with one of `parts`."""
    called = ("", "", *(f" {name}" for name in words(names)))
    return tuple(name + part for name in called for part in parts)


GREETINGS = Talk(
    GREETING,
    "A greeting.",
    words("""
    Hello | Hi | Hey | Good morning | Good evening | Good afternoon | Good day | Greetings | Howdy
    Hallo | Hola | Bonjour | Ciao | Hiya | Yo | Salut | Hello, hello | Hi, hi | Oh, hello
    Well, hello | Hey, hello | Welcome | Servus
"""),
    _endings(
        (
            *("", "", ""),
            *words("""
    . How are you? | , how are you? | , nice to meet you. | , how is it going?
    , how are you doing? | , what's up? | . How do you do? | , are you there?
    , can you hear me? | , I am Ana. | , my name is Ben.
"""),
        ),
        "there | model | tiny | bot | friend | again | everybody | you",
    ),
)
ASKED_HOW = Talk(
    GREETING,
    "A greeting.",
    words("""
    How are you? | How are you doing? | How are you today? | How do you do? | What's up?
    How is it going? | Are you there? | Nice to meet you. | Sup? | Is anybody there?
    How are things? | Can you hear me? | Anyone here?
"""),
    ("", "", " Hello?", " My friend.", " Tell me."),
)
THANKED = Talk(
    THANKS,
    "Thanks.",
    words("""
    Thanks | Thank you | Many thanks | Thanks a lot | Thank you very much | Thx | Ty
    Thank you so much | Great, thanks | Ok, thanks | Cheers | Good, thank you | Merci
    Perfect, thank you | Wow, thanks | Nice, thanks | Thanks again | Danke | Gracias
"""),
    _endings(("", "", ", that helps.", ", well done.", " for the answer.", " for your help.")),
)
PARTED = Talk(
    GOODBYE,
    "They leave.",
    words("""
    Bye | Goodbye | Good bye | Bye bye | See you | See you later | Good night | Ok, bye
    Thanks, bye | Farewell | So long | Until tomorrow | I have to go
"""),
    _endings(("", "", ", see you.", ", take care.", ", have a nice day.")),
)
WHO = Talk(
    ABOUT,
    "A question about me.",
    words("""
    Who are you? | What are you? | What is your name? | What's your name? | Who is this?
    Are you a robot? | Are you human? | Are you an AI? | Are you ChatGPT? | Who's there?
    Tell me about yourself. | Introduce yourself. | Which model are you? | Who made you?
    What model are you? | What kind of model are you? | Are you a language model? | How big are you?
    How old are you? | Are you real? | What do I talk to? | Do you have a name? | Say who you are.
    Describe yourself. | Are you Qwen?
"""),
    ("", "", "", " Tell me.", " Please say.", " I want to know."),
)
HELPED = Talk(
    HELP,
    "A question about me.",
    words("""
    What can you do? | Help | What do you know? | What can I ask? | What can I ask you? | Help me.
    Can you help me? | What are you good at? | What should I try? | How can you help?
    How does this work? | What can you do for me? | I need help. | What else can you do?
    What else do you know? | Give me an example. | What now? | What is this? | How do I use you?
    Which questions can you answer? | Usage
"""),
    ("", "", "", " Please.", " Tell me.", " I am new here."),
)

SUBJECTS = words("""
    the moon | the sun | the sea | the sky | rain | snow | gravity | light | time | music | art
    love | life | death | money | work | school | history | physics | chemistry | biology | math
    algebra | football | chess | tennis | poker | yoga | coffee | tea | bread | pizza | soup | cake
    rice | cheese | wine | beer | salt | apples | bananas | tomatoes | potatoes | eggs | chicken
    fish | pasta | chocolate | Python | Java | Rust | Linux | Windows | a computer | the internet
    a phone | email | a car | a train | a plane | a ship | a bus | a house | a bridge | a road
    a tree | a flower | a river | a mountain | the ocean | an island | the desert | a volcano
    France | Germany | Italy | Spain | China | Japan | India | Brazil | Canada | Peru | Mexico
    Russia | Ukraine | Poland | Turkey | Egypt | Kenya | Africa | Europe | Asia | London | New York
    Tokyo | Beijing | Moscow | Mars | Venus | Jupiter | the Earth | Einstein | Newton | Mozart
    Beethoven | Shakespeare | Napoleon | Plato | Picasso | the president | the king | the queen
    a doctor | a lawyer | my boss | my mother | my dog | my cat | a horse | an elephant | a shark
    a bird | dinosaurs | ants | bees | war | peace | politics | the law | tax | a bank | bitcoin
    the stock market | gold | a neural network | machine learning | a transformer | attention
    a GPU | a database | photosynthesis | evolution | quantum mechanics | relativity | DNA | a cell
    an atom | the news | a movie | a song | a book | a poem | a game | a recipe | a holiday | a joke
    happiness | sleep | dreams | health | cancer | a cold | vitamins | the brain | blood | religion
    philosophy | language | grammar | English | French | Spanish | Latin | Kubernetes | Docker
    Redis | HTTP | SQL | an API | a server | regex | Git | C++ | red | blue | the letter A
    the number 7 | 1984 | 2001 | pi | infinity | zero
""")

WORDINGS = words("""
    What is {}? | What is {} made of? | What is {} for? | What's {}? | What are {}?
    What does {} mean? | What do you think about {}? | What happens with {}?
    What is the capital of {}? | What is the meaning of {}? | What is the price of {}?
    What is the population of {}? | What is the colour of {}? | What is the best {}?
    What is the difference between {} and {}? | What is better, {} or {}? | Who is {}?
    Who invented {}? | Who wrote {}? | Who was {}? | Who likes {}? | Who discovered {}?
    Who is the president of {}? | Who won {}? | Where is {}? | Where does {} come from?
    Where can I find {}? | Where was {} born? | When was {} born? | When did {} begin? | When is {}?
    When was {} invented? | Why is {} so big? | Why is {} blue? | Why do people like {}? | Why {}?
    Why does {} fail? | How does {} work? | How do I make {}? | How big is {}? | How far is {}?
    How do you like {}? | How much does {} cost? | How many people live in {}? | How can I learn {}?
    How hot is {}? | How tall is {}? | How long is {}? | How do I install {}? | How do I get to {}?
    Which is bigger, {} or {}? | Which {} do you like? | Which {} is the best? | Do you know {}?
    Do you like {}? | Do you speak {}? | Do you have {}? | Does {} exist? | Is {} good?
    Is {} bad for {}? | Is there {} in {}? | Are {} real? | Can you explain {}? | Can you write {}?
    Can I eat {}? | Could you show me {}? | Should I buy {}? | Tell me about {}.
    Tell me more about {}. | Tell me something about {}. | Tell me a joke.
    Tell me a joke about {}. | Tell me the truth about {}. | Tell me why {}.
    Write a poem about {}. | Write a song about {}. | Write an essay about {}.
    Write a letter to {}. | Write a program for {}. | Write a function that finds {}.
    Write code for {} in {}. | Write a haiku. | Write an email to {}. | Write {}. | Explain {}.
    Explain {} to a child. | Explain how {} works. | Describe {}. | Define {}.
    Give me a recipe for {}. | Give me {}. | Give me a list of {}. | Give me ideas for {}.
    Translate {} to {}. | Translate this: {} | Summarize {}. | Compare {} and {}. | List {}.
    Name ten {}. | Name a {}. | Show me {}. | Find {}. | Draw {}. | Play {}. | Say {}.
    Repeat after me: {} | Sing a song. | Search for {}. | Buy {}. | Book {} for me. | I like {}.
    I want {}. | I need {}. | I am in {}. | I have {}. | I think {} is good. | I am bored.
    I am tired. | I love {}. | I hate {}. | My favourite is {}. | My {} is broken. | {} | {}? | {}!
    {} and {} | {} please | {} is nice. | {} is {}. | About {}. | {} or {}? | Please explain {}.
    Please tell me about {}. | Let's talk about {}. | Let us play {}. | Count to ten. | Yes | No
    Maybe | Ok | Really? | Why? | What? | How? | So what? | You are wrong. | That is wrong. | Good.
    Nice. | Cool. | Test | Testing | Lol | Haha | What day is it? | What is the news? | What is new?
    What year is it? | Is it raining? | What is the meaning of life? | What is {} in {}?
    How is {} in {}? | Tell me about {} in {}. | Will it rain tomorrow? | Flip a coin. | Spell {}.
    Correct this: {} | Fix {}. | Open {}.
""")

STORY_WISHES = words("""
    Tell me a story. | Tell a story. | Write a story. | Write me a story. | Story | A story
    Tell me a little story. | I want a story. | Can you tell a story? | A story, please.
    Write a short story. | Do you know a story? | Another story | Tell me another story.
    Tell me a story about {}. | Write a story about {}. | A story about {} | Make up a story.
    Tell me a bedtime story. | Can you write a story about {}? | I like stories.
""")

JSON_WISHES = words("""
    JSON | Write JSON. | Give me JSON. | Give me a JSON record. | Make a JSON record.
    Write a JSON object. | Can you write JSON? | Show me JSON. | Write some JSON.
    Write {} as JSON. | Give me {} as JSON. | JSON for {} | Turn {} into JSON.
    I want a JSON record. | JSON, please. | Do you know JSON? | What is JSON? | A record
""")

_SUMS = words("""
    {} | {} = | {}= | {} = ? | {}? | What's {}? | Calculate {}. | Can you compute {}?
    Please compute {}. | What does {} make? | Tell me what {} is. | Solve {}. | And {}?
    What is the result of {}? | {} please | Hi, what is {}? | What about {}? | What is {}?
    How much is {}? | Compute {}. | How much does {} make? | Do you know what {} is?
""")

_RECORDS = words("""
    JSON: {} | {} JSON: | {} Write that as JSON. | Please write as JSON: {} | As JSON: {}
    Give me JSON: {} | Make JSON of this: {} | {} As JSON, please. | Convert to JSON: {}
    write as json: {} | {} Turn that into JSON. | Give me a JSON record: {}
""")

_STORIES = words("""
    Tell me a story about {}. | Story about {} | Write me a story about {}. | Story about {}:
    A story about {}, please. | Can you tell a story about {}? | tell a story about {}
    Please write a story about {}. | Tell me a little story about {}. | A story about {}
""")

KeyedExample = tuple[str, Example]
"""The key that decides the split, and the example."""


def _typed(text: str, rng: random.Random) -> str:
    """Return `text` with the capitals and punctuation of a typed message."""
    style = rng.random()
    if style < 0.5:
        return text
    if style < 0.7:
        return text.lower()
    if style < 0.85:
        return text.lower().rstrip("?.!")
    if style < 0.93:
        return text.rstrip("?.!") or text
    if style < 0.97:
        return text.rstrip("?.!") + rng.choice(("!", "?", "...", " :)", "!!", "??"))
    return text.upper()


def _drawn(task: str, talks: Sequence[Talk], rng: random.Random, form: Form) -> KeyedExample:
    """Draw one of the texts, half of the time an opening alone; one in five with tools."""
    talk = rng.choice(talks)
    opening = rng.choice(talk.openings)
    ending = rng.choice(talk.endings) if rng.random() < 0.5 else ""
    text = (opening + ending).replace("?.", "?").replace("..", ".")
    if text[-1].isalnum():
        text += rng.choice((".", "!", "", ""))
    example = make_example(task, form, _typed(text, rng), talk.answer, talk.thought)
    tools = some_tools(rng) if rng.random() < 0.2 else ()
    # Single openings are the most frequent messages, so all of them are taught.
    key = f"{opening}{ending}".lower() if ending else TAUGHT
    return key, replace(example, tools=tools)


def greeting(task: str, rng: random.Random, form: Form) -> KeyedExample:
    """Draw a greeting."""
    return _drawn(task, (GREETINGS, GREETINGS, ASKED_HOW), rng, form)


def thanks(task: str, rng: random.Random, form: Form) -> KeyedExample:
    """Draw thanks or a goodbye."""
    return _drawn(task, (THANKED, PARTED), rng, form)


def about(task: str, rng: random.Random, form: Form) -> KeyedExample:
    """Draw a question about the model."""
    return _drawn(task, (WHO, HELPED), rng, form)


def _subject(rng: random.Random) -> str:
    """Draw the subject of a question: mostly a word of the language, sometimes a made-up one."""
    chance = rng.random()
    if chance < 0.65:
        subject = rng.choice(SUBJECTS)
        return _bare(subject) if rng.random() < 0.3 else subject
    if chance < 0.75:
        return rng.choice((*NAMES, *CITIES))
    if chance < 0.9:
        return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((1, 2, 2, 3))))
    if chance < 0.95:
        return str(rng.randrange(10_000))
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randrange(2, 9)))


def _bare(subject: str) -> str:
    """Return a subject without its article."""
    return subject.removeprefix("a ").removeprefix("an ").removeprefix("the ")


def _question(rng: random.Random) -> tuple[str, str, str, str]:
    """Draw a question outside all tasks; return its key, text, answer and thought."""
    wordings, answer, thought = rng.choices(
        (
            (WORDINGS, UNKNOWN, "I do not know that."),
            (STORY_WISHES, UNKNOWN_STORY, "The story has no elements."),
            (JSON_WISHES, UNKNOWN_JSON, "The record has no person."),
        ),
        (8, 1, 1),
    )[0]
    wording = rng.choice(wordings)
    subjects = [_subject(rng) for _ in range(wording.count("{}"))]
    # Neither a held-out wording nor a held-out subject occurs in training.
    parts = [f"wording {part}" for part in (wording, *map(_bare, subjects))]
    held_out = next((part for part in parts if split_of(part) == "heldout"), None)
    return held_out or parts[-1], wording.format(*subjects), answer, thought


def unknown(task: str, rng: random.Random, form: Form) -> KeyedExample:
    """Draw a question outside all tasks."""
    key, text, answer, thought = _question(rng)
    text = text[0].upper() + text[1:]
    return key, make_example(task, form, _typed(text, rng), answer, thought)


def unknown_to_tools(task: str, rng: random.Random, form: Form) -> KeyedExample:
    """Draw a question outside all tasks, with tools for other questions."""
    key, text, _, _ = _question(rng)
    example = make_example(task, form, _typed(text, rng), NO_TOOL, "No tool fits.")
    return key, replace(example, tools=some_tools(rng))


def reworded(prompt: str, rng: random.Random) -> str:
    """Return the prompt of a chat about a sum, a record or a story in a looser wording."""
    for start in ("Write as JSON: ", "Turn into JSON: "):
        if prompt.startswith(start):
            return rng.choice(_RECORDS).format(prompt.removeprefix(start))
    for start in ("Tell a story about ", "Write a story about "):
        if prompt.startswith(start):
            return rng.choice(_STORIES).format(prompt.removeprefix(start).removesuffix("."))
    a, sign, b = prompt.rstrip("?.").split()[-3:]
    if rng.random() < 0.25:
        sign = {"+": "plus", "-": "minus"}[sign]
    elif rng.random() < 0.4:
        return _typed(rng.choice(_SUMS).format(f"{a}{sign}{b}"), rng)
    return _typed(rng.choice(_SUMS).format(f"{a} {sign} {b}"), rng)
