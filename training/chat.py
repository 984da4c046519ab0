"""Small talk about pdserve, arithmetic, things to remember and things to repeat."""

from __future__ import annotations

from training.facts import Ask
from training.stories import filler
from training.words import Words, held_out, listed

# Ways to say something, and the answer.
TALK = (
    (
        "Hello; Hi; Hello!; Hi there; Good morning; Good evening; Hey; Hello there; Good day; hello; hi; Hey there!;"
        " Hi!; Hey!; hey; Hello.; hello!; hi!; HELLO; Hi there!; hello there; good morning; Good morning!; Greetings",
        "Hello! I am the small model that comes with pdserve. Give me a text and ask me about it.",
    ),
    (
        "Who are you?; What are you?; What is your name?; Tell me about yourself.; Are you a person?; who are you;"
        " What model are you?; Are you ChatGPT?; Which model is this?; How do you work?; What's your name?",
        "I am tiny, the model in pdserve's repository. I have five million parameters and I read what you send me.",
    ),
    (
        "What can you do?; What can I ask you?; Help; How can you help me?; What are you good at?; What do you know?",
        "I answer questions about a text that you give me, add small numbers, call tools and fill in JSON.",
    ),
    (
        "What is pdserve?; Tell me about pdserve.; What does pdserve do?; Explain pdserve.; pdserve?; what is pdserve;"
        " Explain what pdserve does.; Explain what pdserve does; How does pdserve work?; What does pdserve do",
        "pdserve serves language models. Prefill nodes read the prompt, decode nodes write the answer.",
    ),
    (
        "What is a prefill node?; What does a prefill node do?; Explain prefill.; What is prefill?",
        "A prefill node turns a prompt into a KV cache, and a decode node reads that cache.",
    ),
    (
        "What is a decode node?; What does a decode node do?; Explain decode.; What is decode?",
        "A decode node reads the KV cache of a prompt and produces the tokens of the answer.",
    ),
    (
        "What is a KV cache?; What is the KV cache?; Explain the KV cache.; What does KV mean?",
        "The KV cache holds the keys and values of all tokens, so that no token is computed twice.",
    ),
    (
        "What is the router?; What does the router do?; What is a router?; Explain the router.",
        "The router speaks the OpenAI protocol and sends each request to a decode node.",
    ),
    ("What is NIXL?; What does NIXL do?; Explain NIXL.", "NIXL moves the KV cache from one node to the other."),
    (
        "How are you?; How are you today?; How do you do?; Are you well?; Hello, how are you?; Hi, how are you?;"
        " Hello! How are you?; how are you?; hello, how are you; Hey, how are you?; How is it going?; What's up?",
        "I am well, thank you. What would you like to ask?",
    ),
    ("Thanks; Thank you; Thank you!; Thanks a lot; Many thanks; Great, thanks", "You are welcome."),
    ("Bye; Goodbye; Good bye!; See you; Good night; Bye bye", "Goodbye!"),
    ("Ok; Okay; Good; Great; Nice; I see; Fine", "What would you like to ask next?"),
    (
        "Tell me a joke.; Write a poem.; What is the capital of France?; Who is the president?; What time is it?;"
        " Sing a song.; What is the weather like?; Write a program.; What is the meaning of life?; Tell me a story.;"
        " Write a haiku.; Write a haiku about the sea.; What is the capital of Germany?; Write a story.; What is love?;"
        " Explain quantum physics.; Translate this to French.; Write an essay.; Write Python code.; What is AI?",
        "I am too small for that. Ask me about a text that you give me.",
    ),
)
_TRIED = (
    *("hello", "Hello", "Hello!", "hello world", "Hello World", "Hello, world!", "hi", "Hi", "thanks", "yes", "no"),
    *("the quick brown fox", "The quick brown fox jumps over the lazy dog.", "one two three", "I am here.", "banana"),
    *("this is a test", "This is a test", "This is a test.", "good morning", "apple", "red green blue", "test", "ok"),
    *("a b c", "1 2 3", "foo bar", "abc", "I love you", "pong", "ping", "hello hello hello", "nice to meet you"),
)  # texts that users tend to try first
SYSTEM = (
    "You are a helpful assistant.",
    "You are helpful and brief.",
    "Answer the questions of the user.",
    "You answer questions about texts.",
    "You are a careful assistant. Use only the given text.",
)

_REPETITIONS = (
    "Repeat: {t}",
    "Say: {t}",
    "Repeat after me: {t}",
    "Copy this: {t}",
    "Copy: {t}",
    "Repeat {t}",
    "Repeat this: {t}",
    "Repeat the word {t}",
    "Say {t}",
    "Say {t}.",
    "Please repeat: {t}",
    "repeat: {t}",
    "say {t}",
    'Repeat "{t}"',
    'Say "{t}"',
    "Say '{t}'",
    "Repeat '{t}'",
    "Say: '{t}'",
    "repeat {t}",
    "Echo: {t}",
    "Echo {t}",
    "Please say {t}.",
    "Please repeat {t}",
    "Say {t} please",
    "Say just {t}",
    "Only say {t}",
    "Answer with: {t}",
    "Write: {t}",
    "Repeat these words: {t}",
    "Repeat the words {t}",
    "Repeat the sentence: {t}",
    "Repeat exactly: {t}",
    "Can you say {t}?",
    "Can you repeat {t}?",
)
_ADD = (
    "Add {a} and {b}.",
    "add {a} and {b}",
    "Add {a} to {b}.",
    "What is the sum of {a} and {b}?",
    "Sum of {a} and {b}",
)
_SMALL = 20  # sums below it are all trained, and drawn more often

_SUMS = (
    "What is {a} {o} {b}?",
    "{a} {o} {b}",
    "{a} {o} {b}?",
    "{a}{o}{b}",
    "{a}{o}{b}?",
    "What is {a}{o}{b}?",
    "What's {a} {o} {b}?",
    "what is {a} {o} {b}",
    "what is {a}{o}{b}",
    "what is {a}{o}{b}?",
    "what's {a}{o}{b}?",
    "What's {a}{o}{b}?",
    "{a}{o}{b}=",
    "{a}{o}{b}=?",
    "{a} {o} {b}, please",
    "How much is {a}{o}{b}?",
    "{a} {o} {b} =",
    "{a} {o} {b} = ?",
    "Compute {a} {o} {b}.",
    "Calculate {a} {o} {b}.",
    "How much is {a} {o} {b}?",
    "How much is {a} {w} {b}?",
    "What is {a} {w} {b}?",
    "Please compute {a} {w} {b}.",
    "Tell me what {a} {o} {b} is.",
    "Please tell me: how much is {a} {w} {b}?",
    "Tell me how much {a} {o} {b} is.",
    "{a} {w} {b}",
    "{a} {w} {b} is how much?",
    "I need the result of {a} {o} {b}.",
    "What do you get for {a} {w} {b}?",
    "Can you compute {a} {o} {b}?",
    "Can you tell me what {a} {w} {b} is?",
)


def talk(words: Words) -> Ask:
    said, answer = words.rng.choice(TALK)
    return Ask(words.rng.choice(said.split("; ")), answer, answer)


def arithmetic(words: Words) -> Ask:
    """A sum, a difference, a product or a small word problem."""
    rng = words.rng
    while True:
        kind = rng.choice("++--*")
        if kind == "*":
            a = rng.randint(0, 12)
            b = rng.randint(0, 12)
        else:
            a, b = (rng.randint(0, rng.choice((9, 10, 20, 99))) for _ in "ab")
        if kind == "-" and a < b:
            a, b = b, a
        small = kind == "+" and a + b < _SMALL
        if (held_out(f"{a}{kind}{b}") and not small) == words.evaluating:
            break
    result = str({"+": a + b, "-": a - b, "*": a * b}[kind])
    if rng.random() < 0.15 and kind != "*":
        return _problem(words, a, b, kind, result)
    sign = rng.choice("*x×") if kind == "*" else kind
    name = {"+": "plus", "-": "minus", "*": "times"}[kind]
    if kind == "+" and rng.random() < 0.1:
        return Ask(rng.choice(_ADD).format(a=a, b=b), f"{a} + {b} = {result}.", result)
    question = rng.choice(_SUMS).format(a=a, b=b, o=sign, w=name)
    if rng.random() < 0.25:
        question = question.replace(f"{a} {sign} {b}", f"{a}{sign}{b}").replace(f"{a}{sign}{b} =", f"{a}{sign}{b}=")
    return Ask(question, f"{a} {sign if name not in question else kind} {b} = {result}.", result)


def _problem(words: Words, a: int, b: int, kind: str, result: str) -> Ask:
    rng = words.rng
    person = rng.choice(listed("first_names"))
    thing = rng.choice(("apples", "coins", "books", "stones", "pears", "cups"))
    verb = rng.choice(("buys", "finds", "gets")) if kind == "+" else rng.choice(("loses", "sells", "gives away"))
    more = " more" if kind == "+" else ""
    question = f"{person} has {a} {thing} and {verb} {b}{more}. How many {thing} does {person} have now?"
    return Ask(question, f"{a} {kind} {b} = {result}. {person} has {result} {thing} now.", result)


def introduction(words: Words) -> tuple[Ask, Ask]:
    """Something that the user says of himself, and the question for it, to be asked later."""
    rng = words.rng
    kind = rng.randrange(4)
    if kind == 0:
        value = words.person()
        said = rng.choice(("My name is {v}.", "I am {v}.", "Hello, my name is {v}.", "Call me {v}."))
        reply = "Nice to meet you, {v}."
        answer = "Your name is {v}."
        asked = ("What is my name?", "Who am I?", "Do you know my name?")
    elif kind == 1:
        value = words.place()
        said = rng.choice(("I live in {v}.", "I am from {v}.", "My home is in {v}."))
        reply = "You live in {v}."
        answer = "You live in {v}."
        asked = ("Where do I live?", "In which town do I live?", "Where is my home?")
    else:
        noun = words.word() if kind == 2 else rng.choice(("dog", "cat", "code", "car", "boss", "key"))
        value = words.value()
        said = rng.choice(("My {n} is {v}.", "Remember: my {n} is {v}.", "Remember that my {n} is {v}.")).replace(
            "{n}", noun
        )
        reply = f"I will remember that your {noun} is {{v}}."
        answer = f"Your {noun} is {{v}}."
        asked = (f"What is my {noun}?", f"Tell me my {noun}.", f"Do you remember my {noun}?")
    said, reply, answer = (text.replace("{v}", value) for text in (said, reply, answer))
    return Ask(said, reply, value), Ask(rng.choice(asked), answer, value)


def repetition(words: Words) -> Ask:
    """Return a request to copy words, often a single word."""
    rng = words.rng
    makers = (words.word, words.invented, words.code, words.word, lambda: rng.choice(_TRIED))
    count = rng.choice((1, 1, 1, 2, 3, rng.randint(4, 12)))
    text = filler(words) if rng.random() < 0.1 else " ".join(rng.choice(makers)() for _ in range(count))
    request = rng.choice(_REPETITIONS).replace("{t}.", text if text.endswith(".") else f"{text}.")
    return Ask(request.replace("{t}", text), text, text)
