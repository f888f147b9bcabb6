"""The words of the bundled model's world: people, things, story plots, facts and chat lines.

Only data lives here; `corpus.py` picks from it. In a plot, every beat is a tuple of alternatives of
which one is written, and a beat whose first alternative is empty may be left out. Names in braces
are filled in by the generator: ``{hero}`` and ``{friend}`` are people, ``{he}``, ``{him}``,
``{his}`` (capitals at a sentence's start) the hero's pronouns, ``{fhe}``, ``{fhim}``, ``{fhis}``
the friend's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GIRLS = [
    "Mia",
    "Lena",
    "Nora",
    "Ada",
    "Ruby",
    "Elsa",
    "Tara",
    "Ivy",
    "Clara",
    "Zoe",
    "Hanna",
    "Rosa",
    "Wren",
    "Maya",
    "Juno",
    "Edith",
    "Pia",
    "Greta",
    "Lucy",
    "Anna",
    "Bella",
    "Sofia",
    "Olive",
    "Hazel",
]
BOYS = [
    "Tom",
    "Ben",
    "Oscar",
    "Finn",
    "Leo",
    "Max",
    "Theo",
    "Sam",
    "Hugo",
    "Paul",
    "Emil",
    "Jack",
    "Ravi",
    "Noah",
    "Otto",
    "Felix",
    "Milo",
    "Jonas",
    "Karl",
    "Peter",
    "Luca",
    "Adam",
    "Simon",
    "Toby",
]

COLOURS = ["red", "blue", "green", "yellow", "white", "brown", "purple", "orange", "grey", "silver"]
SIZES = ["small", "big", "tiny", "round", "old", "new", "bright", "little"]
TOYS = [
    "kite",
    "ball",
    "drum",
    "boat",
    "puppet",
    "whistle",
    "lantern",
    "scarf",
    "hat",
    "basket",
    "bell",
    "book",
    "spoon",
    "marble",
    "ribbon",
    "top",
    "wagon",
    "flute",
    "button",
    "mitten",
    "compass",
    "box",
    "cup",
    "blanket",
]
PLACES = [
    "the park",
    "the garden",
    "the beach",
    "the forest",
    "the meadow",
    "the old mill",
    "the village square",
    "the hill",
    "the river",
    "the orchard",
    "the schoolyard",
    "the pond",
    "the bridge",
    "the barn",
    "the lighthouse",
    "the market",
]
SPOTS = [
    "under a bench",
    "behind a tree",
    "under a pile of leaves",
    "inside an old boot",
    "next to the well",
    "on a branch",
    "between two rocks",
    "beside the gate",
    "in a flower pot",
    "below the steps",
    "on top of the wall",
    "in the tall grass",
]
FOODS = [
    "apple pie",
    "plum cake",
    "warm bread",
    "pea soup",
    "honey cookies",
    "cherry jam",
    "corn muffins",
    "pancakes",
    "nut cake",
]
SNACKS = [
    "pear",
    "peach",
    "sandwich",
    "bun",
    "muffin",
    "pretzel",
    "plum",
    "banana",
    "carrot",
    "cookie",
]
ANIMALS = [
    "rabbit",
    "fox",
    "duck",
    "hedgehog",
    "squirrel",
    "owl",
    "frog",
    "mouse",
    "kitten",
    "puppy",
    "lamb",
    "sparrow",
    "turtle",
    "pony",
    "goat",
    "deer",
]
PLANTS = [
    "beans",
    "sunflowers",
    "tomatoes",
    "pumpkins",
    "carrots",
    "roses",
    "peas",
    "strawberries",
    "tulips",
    "corn",
]
FAMILY = [
    "mother",
    "father",
    "grandmother",
    "grandfather",
    "aunt",
    "uncle",
    "big sister",
    "big brother",
]
PETNAMES = ["Pip", "Dot", "Coco", "Moss", "Fluff", "Biscuit", "Pepper", "Nutmeg", "Button", "Patch"]
LEFTOVERS = ["bread", "soup", "cheese", "cake", "rice", "fish"]
BAGS = ["bag", "basket", "box", "backpack"]
CLOTHS = ["a warm blanket", "a soft towel", "an old coat", "a thick scarf"]
TOOLS = ["a small spade", "a watering can", "a little rake", "a pair of gloves"]
SEASONS = ["spring", "summer", "autumn", "winter"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
NUMBER_WORDS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@dataclass(frozen=True)
class Plot:
    """One kind of story: its titles, the slots it draws, its beats, and questions about it."""

    name: str
    titles: tuple[str, ...]
    slots: dict[str, tuple[str, ...]]
    beats: tuple[tuple[str, ...], ...]
    questions: tuple[tuple[str, str], ...]
    key: str = "thing"
    extra: dict[str, str] = field(default_factory=dict)


OPENINGS = (
    "One {weather} morning, {hero} went to {place}.",
    "One {weather} day, {hero} was at {place}.",
    "Once there was a {kid} named {hero}. {He} liked to play at {place}.",
    "{hero} was a {mood} {kid} who lived near {place}.",
    "On a {weather} {day}, {hero} and {his} {kin} walked to {place}.",
    "It was a {weather} day in {season}. {hero} ran to {place}.",
    "There once was a {mood} {kid} called {hero}. Every {day}, {he} went to {place}.",
    "Early in the morning, {hero} put on {his} shoes and went to {place}.",
)
WEATHER = ["sunny", "windy", "cold", "warm", "cloudy", "bright", "foggy", "quiet", "mild", "frosty"]
MOODS = [
    "cheerful",
    "quiet",
    "curious",
    "kind",
    "clever",
    "brave",
    "shy",
    "busy",
    "patient",
    "gentle",
]
CLOSINGS = (
    "From that day on, {hero} and {friend} were the best of friends.",
    "That night, {hero} told {his} {kin} the whole story and fell asleep with a smile.",
    "{hero} was tired but happy when {he} came home.",
    '"What a good day," said {hero}.',
    "It was a day that {hero} would never forget.",
    "When the sun went down, they walked home together.",
    "{hero} learned that it is good to ask for help.",
    "And {hero} smiled all the way home.",
    '"Let us do this again on {day}," said {friend}, and {hero} agreed.',
    "{friend} waved, and {hero} waved back.",
)

PLOTS: tuple[Plot, ...] = (
    Plot(
        "lost",
        ("The Lost {Toy}", "Where Is the {Toy}?", "{hero} and the Lost {Toy}"),
        {"spot": tuple(SPOTS)},
        (
            (
                "{He} had {a_thing} with {him}.",
                "In {his} hand {he} carried {a_thing}.",
                "{He} took {his} {thing} along.",
            ),
            (
                "It was a gift from {his} {kin}.",
                "{He} loved the {toy} more than any other toy.",
                "The {toy} was very dear to {him}.",
                "{His} {kin} had given it to {him} in {season}.",
            ),
            (
                "But after lunch the {toy} was gone.",
                "When it was time to go home, {he} could not find the {toy}.",
                "Then {he} looked down, and the {toy} was not there.",
                "While {he} was playing, the {toy} got lost.",
            ),
            (
                '"Oh no!" cried {hero}. "Where is my {toy}?"',
                "{hero} felt sad and began to cry.",
                "{He} looked here and there, but {he} did not see it.",
                "{hero} looked in every pocket, but the {toy} was not there.",
            ),
            (
                "{friend} heard {him} and came to help.",
                '{friend} came by and asked, "Why are you sad?"',
                'Then {he} met {friend}. "I will help you look," said {friend}.',
                "{hero} asked {friend} for help.",
            ),
            (
                "They looked for a long time.",
                "They walked slowly and looked at the ground.",
                "{friend} looked on the left, and {hero} looked on the right.",
                "",
            ),
            (
                "At last, {friend} saw the {thing} {spot}.",
                "In the end {hero} found the {thing} {spot}.",
                "And there it was! The {toy} lay {spot}.",
                'Then {friend} called, "Look!" The {toy} was {spot}.',
            ),
            (
                '"Thank you," said {hero}, and {he} gave {friend} a hug.',
                "{hero} was so glad that {he} danced.",
                '"You are a true friend," said {hero}.',
                "{hero} held the {toy} tight and thanked {friend}.",
            ),
        ),
        (
            ("What did {hero} lose?", "{hero} lost {a_thing}."),
            ("Where was the {toy}?", "The {toy} was {spot}."),
            ("Who helped {hero}?", "{friend} helped {hero}."),
            ("Where did {hero} go?", "{hero} went to {place}."),
        ),
    ),
    Plot(
        "share",
        ("{hero} Shares", "The Last {Snack}", "Half for You"),
        {"snack": tuple(SNACKS)},
        (
            (
                "{He} had only one {snack} in {his} {toy_bag}.",
                "{His} {kin} had given {him} a {snack} to eat.",
                "{He} sat down and took out a {snack}.",
            ),
            (
                "{friend} sat nearby and had nothing to eat.",
                "{friend} looked at the {snack} with big eyes.",
                "Then {friend} came along. {Fhe} had lost {fhis} lunch.",
            ),
            (
                '"Are you hungry?" asked {hero}.',
                '"You look hungry," said {hero}.',
                "{hero} saw that {friend} was hungry.",
            ),
            (
                '"Yes, very," said {friend}.',
                "{friend} nodded.",
                '"A little," said {friend} in a low voice.',
                "",
            ),
            (
                "{hero} thought for a moment. {He} was hungry too.",
                "{hero} wanted to eat all of it, but that did not feel right.",
                "At first {hero} did not want to share.",
            ),
            (
                "Then {he} cut the {snack} in two and gave one half to {friend}.",
                "So {he} gave {friend} the bigger half of the {snack}.",
                'Then {he} said, "Here, half of it is for you."',
            ),
            (
                "They ate together and talked about {animal_plural}.",
                "The {snack} tasted even better that way.",
                '"This is the best {snack} I ever had," said {friend}.',
            ),
            (
                "The next day, {friend} brought {a_thing} for {hero}.",
                "Later {friend} gave {hero} {a_thing} to say thank you.",
                "To say thank you, {friend} let {hero} play with {fhis} {thing}.",
            ),
        ),
        (
            ("What did {hero} share?", "{hero} shared a {snack}."),
            ("Who was hungry?", "{friend} was hungry."),
            ("What did {friend} bring for {hero}?", "{friend} brought {a_thing}."),
        ),
    ),
    Plot(
        "rescue",
        ("The Little {Animal}", "{hero} and the {Animal}", "A {Animal} in Need"),
        {
            "animal": tuple(ANIMALS),
            "trouble": (
                "stuck in the mud",
                "caught in a net",
                "cold and wet",
                "lost and alone",
                "stuck in a hollow log",
                "too tired to walk",
            ),
        },
        (
            (
                "There {he} heard a soft sound.",
                "Suddenly {he} saw something move.",
                "Near the path {he} stopped, because something was crying.",
            ),
            (
                "It was a little {animal}, and it was {trouble}.",
                "A {animal} looked up at {him}. It was {trouble}.",
                "There sat a young {animal}. It was {trouble}.",
            ),
            (
                '"Do not be afraid," said {hero}.',
                '"Poor little {animal}," {he} said softly.',
                "{hero} sat down so that the {animal} would not be scared.",
            ),
            (
                "{He} ran to get {friend}.",
                "{He} called {friend}, who knew a lot about animals.",
                "{friend} came with a rope and a warm towel.",
            ),
            (
                "Together they worked with care until the {animal} was safe.",
                "They helped the {animal} and gave it some water.",
                "They wrapped the {animal} in {a_thing_cloth} and carried it to a dry place.",
            ),
            (
                "{friend} gave it some food, and soon it felt better.",
                "The {animal} ate a few leaves and closed its eyes.",
                "After a while the {animal} stopped shaking.",
                "",
            ),
            (
                '"It needs its mother," said {friend}. So they took it home to {place2}.',
                "In the evening they brought the {animal} to {place2} and let it go.",
                "The next day the {animal} ran off to {place2}.",
            ),
            (
                "Sometimes the {animal} came back to visit {hero}.",
                "The {animal} turned around once, as if to say thank you.",
                "{hero} named it {petname}.",
            ),
        ),
        (
            ("What animal did {hero} find?", "{hero} found a {animal}."),
            ("What was wrong with the {animal}?", "The {animal} was {trouble}."),
            ("Who helped {hero}?", "{friend} helped {hero}."),
            ("Where did the {animal} go?", "The {animal} went to {place2}."),
        ),
        key="animal",
    ),
    Plot(
        "garden",
        ("{hero} and the {Plants}", "The Small Garden", "Waiting for the {Plants}"),
        {"plants": tuple(PLANTS), "pest": ("snails", "birds", "rabbits", "beetles", "mice")},
        (
            (
                "In {season}, {hero} got a bag of seeds from {his} {kin}.",
                "{His} {kin} gave {him} seeds and {a_thing_tool}.",
                "{hero} wanted to grow {plants}.",
            ),
            (
                "{He} made small holes and put one seed in each.",
                "{He} dug in the soft earth and planted the seeds in a row.",
                "{friend} dug the holes, and {hero} put in the seeds.",
            ),
            (
                "Every day {he} gave them water.",
                "Each morning {he} came to look, but nothing happened.",
                "For {num} days nothing came up.",
            ),
            (
                '"Maybe the seeds are asleep," said {hero}.',
                '"You must be patient," said {friend}.',
                "{hero} wanted to give up, but {friend} told {him} to wait.",
            ),
            (
                "Then, after the rain, {num} green leaves came out of the ground.",
                "One day {he} saw a tiny green leaf.",
                "At last the first green tips came up.",
            ),
            (
                "But {pest} came and ate some of the leaves.",
                "Some {pest} tried to eat them, so {hero} built a little fence.",
                "{friend} kept the {pest} away.",
                "",
            ),
            (
                "By the end of {season2}, the garden was full of {plants}.",
                "Soon there were {plants} all over the garden.",
                "In {season2} the {plants} were tall and strong.",
            ),
            (
                "{hero} gave some of the {plants} to {friend}.",
                "{He} took a basket of {plants} to {his} {kin}.",
                '"I grew these by myself," {he} said with pride.',
            ),
        ),
        (
            ("What did {hero} grow?", "{hero} grew {plants}."),
            ("Who helped {hero} in the garden?", "{friend} helped {hero}."),
        ),
        key="plants",
    ),
    Plot(
        "bake",
        ("A Cake for {friend}", "{hero} Bakes", "Too Much Salt"),
        {
            "food": tuple(FOODS),
            "mistake": (
                "put in salt and not sugar",
                "forgot the eggs",
                "used too much flour",
                "left it in the oven too long",
                "dropped the bowl on the floor",
            ),
        },
        (
            (
                "{He} wanted to make {food} for {friend}.",
                "It was the birthday of {friend}, so {hero} wanted to bake {food}.",
                '"Let us make {food}," said {hero} to {his} {kin}.',
            ),
            (
                "They took flour, eggs, milk and butter.",
                "{His} {kin} put a big bowl on the table.",
                "{hero} washed {his} hands and put on {a_colour} apron.",
            ),
            (
                "But {hero} {mistake}.",
                "Then something went wrong. {hero} {mistake}.",
                "In a hurry, {hero} {mistake}.",
            ),
            (
                '"It is ruined!" said {hero}.',
                "{hero} wanted to cry.",
                "{He} did not know what to do.",
            ),
            (
                '"We can try again," said {his} {kin}.',
                '"Everyone makes mistakes," {his} {kin} said.',
                "{His} {kin} laughed and took out a clean bowl.",
            ),
            (
                "This time {hero} read every line of the recipe.",
                "This time they went slowly.",
                "So they began again, step by step.",
            ),
            (
                "Soon the whole house smelled of {food}.",
                "After an hour the {food} came out of the oven.",
                "In the end the {food} looked just right.",
            ),
            (
                "{friend} ate {num} pieces and asked for more.",
                '"This is the best {food} in the world," said {friend}.',
                "{friend} clapped {fhis} hands when {fhe} saw it.",
            ),
        ),
        (
            ("What did {hero} make?", "{hero} made {food}."),
            ("Who was the {food} for?", "It was for {friend}."),
            ("What went wrong?", "{hero} {mistake}."),
        ),
        key="food",
    ),
    Plot(
        "fear",
        ("{hero} Is Brave", "A Little Courage", "Not Afraid Any More"),
        {
            "fear": (
                "the dark",
                "deep water",
                "thunder",
                "the tall ladder",
                "big dogs",
                "the old bridge",
                "the cellar",
                "the wind at night",
            ),
        },
        (
            (
                "{hero} was afraid of {fear}.",
                "There was one thing {he} did not like, and that was {fear}.",
                "{He} could do many things, but {he} was scared of {fear}.",
            ),
            (
                "{He} never told anyone about it.",
                "When {he} thought of it, {his} knees shook.",
                "The other children laughed at {him}.",
                "",
            ),
            (
                "One evening, {his} {kin} told {him} to go out with {friend} and be brave.",
                "But {friend} needed help, and {hero} was the only one there.",
                'One day {friend} said, "Come with me, we will do it together."',
            ),
            (
                '"I cannot do it," said {hero}.',
                "{hero} shook {his} head.",
                "{hero} stood still and held {his} breath.",
            ),
            (
                '"I was afraid of {fear} too," said {friend}. "Hold my hand."',
                '"Count to {num} and then take one step," said {friend}.',
                "{friend} gave {him} {a_thing} for luck.",
            ),
            (
                "{hero} took one step, and then one more.",
                "{hero} closed {his} eyes and counted to {num}.",
                "Slowly {hero} went on, and nothing bad happened.",
            ),
            (
                "After a while it was not so bad.",
                "Then {he} began to laugh, because it was almost fun.",
                '"I did it!" cried {hero}.',
            ),
            (
                "Now {hero} is not afraid of {fear} any more.",
                "Since then {he} helps other children who are afraid of {fear}.",
                "{friend} was very proud of {him}.",
            ),
        ),
        (
            ("What was {hero} afraid of?", "{hero} was afraid of {fear}."),
            ("Who helped {hero} to be brave?", "{friend} helped {hero}."),
        ),
        key="fear",
    ),
    Plot(
        "race",
        ("The Great Race", "The {Animal} and the {Animal2}", "Who Is the Fastest?"),
        {"animal": tuple(ANIMALS)},
        (
            (
                "That day the animals held a race to {place2}.",
                "There a {animal} and a {animal2} wanted to know who was faster.",
                'The {animal2} said to the {animal}, "I can run faster than you."',
            ),
            (
                "{hero} was asked to say when to start.",
                "{hero} and {friend} came to watch.",
                "Everyone stood in a line, and {friend} raised {a_colour} flag.",
            ),
            (
                '"One, two, three, go!" said {hero}.',
                "{friend} rang the bell, and off they went.",
                "Then the race began.",
            ),
            (
                "The {animal2} was quick and was soon far ahead.",
                "At first the {animal2} was in front.",
                "The {animal2} ran so fast that the dust flew up.",
            ),
            (
                "But half way the {animal2} stopped to eat a {snack}.",
                "But then the {animal2} took the wrong path.",
                "But the {animal2} sat down {spot} and fell asleep.",
            ),
            (
                "The {animal} did not stop.",
                "The {animal} went on, step by step.",
                "The {animal} never looked back.",
            ),
            (
                "So the {animal} came first.",
                "In the end the {animal} won the race.",
                "The {animal} crossed the line, and everyone cheered.",
            ),
            (
                "The prize was {a_thing}.",
                "{hero} gave the {animal} {a_thing} as a prize.",
                '"You were very fast," said the {animal2}, "and I was too sure of myself."',
            ),
        ),
        (
            ("Who won the race?", "The {animal} won the race."),
            ("Who lost the race?", "The {animal2} lost the race."),
            ("Where did the race end?", "The race ended at {place2}."),
        ),
        key="animal",
    ),
    Plot(
        "market",
        ("{Num} Coins", "At the Market", "{hero} Buys {A_toy}"),
        {"snack": tuple(SNACKS)},
        (
            (
                "{He} had {num} coins in {his} pocket.",
                "{His} {kin} gave {him} {num} coins.",
                "{hero} had saved {num} coins.",
            ),
            (
                "{He} wanted to buy {a_thing}.",
                "For a long time {he} had wished for {a_thing}.",
                "At a stall {he} saw {a_thing}, and {he} liked it very much.",
            ),
            (
                "The woman at the stall smiled at {him}.",
                "A man with {a_colour} hat sold toys there.",
                "There were many people, and it was loud.",
            ),
            (
                '"How much is the {toy}?" asked {hero}.',
                '"May I see the {toy}?" {he} asked.',
                "{He} asked what the {toy} cost.",
            ),
            (
                '"It costs {num} coins," was the answer.',
                '"For you, {num} coins," was the answer.',
                "It cost all the coins {he} had.",
            ),
            (
                "Then {hero} saw {friend}, who wanted a {snack} but had no money.",
                "Next to {him} stood {friend}, who had no coins at all.",
                "",
            ),
            (
                "{hero} paid and took the {toy} home with care.",
                "{hero} gave {his} coins and got the {thing}.",
                "So {hero} bought the {thing} and showed it to {friend}.",
            ),
            (
                "{He} and {friend} played with it until dinner.",
                "{He} let {friend} play with it first.",
                "At home {he} put the {toy} next to {his} bed.",
            ),
        ),
        (
            ("What did {hero} buy?", "{hero} bought {a_thing}."),
            ("How many coins did {hero} have?", "{hero} had {num} coins."),
        ),
    ),
    Plot(
        "learn",
        ("{hero} Learns to {Skill}", "Try Again", "Slow and Steady"),
        {
            "skill": (
                "swim",
                "whistle",
                "ride a bike",
                "play the flute",
                "climb a rope",
                "skate",
                "draw a horse",
                "row a boat",
                "bake bread",
                "read a map",
            ),
        },
        (
            (
                "{hero} wanted to learn to {skill}.",
                "All the other children could {skill}, but {hero} could not.",
                'One day {hero} said, "I want to {skill}."',
            ),
            (
                "{friend} knew how to do it well.",
                "{friend} said that {fhe} would show {him} how.",
                "So {he} asked {friend} to teach {him}.",
            ),
            (
                "The first time, it did not work at all.",
                "On the first day {hero} made many mistakes.",
                "At first it was much too hard.",
            ),
            (
                '"I will never learn it," said {hero}.',
                "{hero} was angry and threw {his} {toy} on the ground.",
                "{hero} sat down and was sad.",
            ),
            (
                '"You only need time," said {friend}.',
                '"Try a little every day," said {friend}.',
                "{friend} said that {fhe} had needed {num} weeks.",
            ),
            (
                "So {hero} tried again on {day}, and again the day after.",
                "For {num} days {hero} did not stop trying.",
                "Every day after school {hero} went back and tried again.",
            ),
            (
                "Then one {weather} day, it worked.",
                "And then, at last, {hero} could {skill}.",
                "Little by little it got better.",
            ),
            (
                "{His} {kin} came to see it and clapped.",
                '"Look at me!" {he} called.',
                "Now {he} teaches the smaller children to {skill}.",
            ),
        ),
        (
            ("What did {hero} want to learn?", "{hero} wanted to learn to {skill}."),
            ("Who taught {hero}?", "{friend} taught {hero}."),
        ),
        key="skill",
    ),
    Plot(
        "quarrel",
        ("The Quarrel", "{hero} Says Sorry", "One {Toy} for Two"),
        {},
        (
            (
                "{friend} was there too, and {fhe} had {a_thing}.",
                "{He} and {friend} found {a_thing} {spot}.",
                "{hero} and {friend} had only one {toy} to play with.",
            ),
            (
                '"It is mine," said {hero}.',
                '"I want to have it first," said {hero}.',
                "{hero} wanted the {toy}, and {friend} wanted it too.",
            ),
            (
                '"No, it is mine!" said {friend}.',
                "{friend} did not want to give it away.",
                "{friend} pulled at one end, and {hero} pulled at the other.",
            ),
            (
                "They were so angry that they did not talk.",
                "They shouted until the birds flew away.",
                "Then the {toy} fell down and broke.",
            ),
            (
                "{hero} went home alone and sat by the window.",
                "At home, {his} {kin} asked what was wrong.",
                "{hero} kicked a stone and felt bad.",
            ),
            (
                "The house was very quiet without {friend}.",
                '"A {toy} is only a {toy}," said {his} {kin}, "but a friend is a friend."',
                "After a while {he} missed {friend}.",
            ),
            (
                'So {he} went to {friend} and said, "I am sorry."',
                '{He} knocked at the door and said, "I am sorry, {friend}."',
                "On {day}, {hero} gave {friend} a {snack} and said that {he} was sorry.",
            ),
            (
                '"I am sorry too," said {friend}, and they played together again.',
                "{friend} smiled, and soon they were laughing.",
                "They agreed to take turns with the {toy}.",
            ),
        ),
        (
            ("What did {hero} and {friend} quarrel about?", "They quarrelled about {a_thing}."),
            ("Who said sorry first?", "{hero} said sorry first."),
        ),
    ),
    Plot(
        "mystery",
        ("A Sound in the Night", "Who Is There?", "The {Animal} at Night"),
        {
            "animal": tuple(ANIMALS),
            "sound": (
                "a knock",
                "a scratch",
                "a soft cry",
                "a strange hum",
                "a loud bump",
                "a little squeak",
            ),
            "room": (
                "the kitchen",
                "the attic",
                "the cellar",
                "the garden shed",
                "the hall",
                "the stable",
            ),
        },
        (
            (
                "That night {friend} stayed with {him}, and they could not sleep.",
                "It was late, but {hero} and {friend} were still awake.",
                "{friend} was staying with {him} that night.",
            ),
            (
                "Then there was {sound} from {room}.",
                "Suddenly {he} heard {sound}. It came from {room}.",
                "From {room} came {sound}.",
            ),
            (
                '"What was that?" whispered {hero}.',
                '"Did you hear that?" {hero} asked {friend}.',
                "{hero} sat up in bed.",
            ),
            (
                '"Maybe it is a ghost," said {friend}.',
                "{He} took {a_colour} lamp and went to look.",
                "{He} put on {his} coat and called {friend}.",
            ),
            (
                "They went on tiptoe, step by step.",
                "The floor was cold, and the stairs were dark.",
                "{hero} opened the door very slowly.",
            ),
            (
                "And who was there? It was only a {animal}!",
                "There, in {room}, sat a {animal}.",
                "Two bright eyes looked at them. It was a {animal}.",
            ),
            (
                "It was eating the {food_left} from dinner.",
                "It had come in to get warm.",
                "It was looking for something to eat.",
            ),
            (
                "They laughed, and {hero} gave it some bread.",
                '"Good night, {animal}," said {hero}.',
                "{hero} made it a bed in an old box, and then everyone could sleep.",
            ),
        ),
        (
            ("What was the sound?", "It was {sound}, and it came from a {animal}."),
            ("Where did the sound come from?", "The sound came from {room}."),
            ("What animal was there?", "It was a {animal}."),
        ),
        key="animal",
    ),
    Plot(
        "gift",
        ("A Gift for {friend}", "The Best Gift", "{hero} Makes {A_toy}"),
        {},
        (
            (
                "The next {day} was the birthday of {friend}.",
                "{friend} was going to have a birthday.",
                "{hero} wanted to give {friend} a gift.",
            ),
            (
                "But {hero} had no money.",
                "{He} looked into {his} purse, but it was empty.",
                "{He} had only {num} coins, and that was not enough.",
            ),
            (
                '"What can I do?" {he} asked {his} {kin}.',
                "{He} thought about it all day.",
                '"I could make something," {he} thought.',
            ),
            (
                '"A gift you make is the best gift," said {his} {kin}.',
                "{His} {kin} gave {him} wood, paper and glue.",
                "In the shed {he} found wood and a pot of {colour} paint.",
            ),
            (
                "So {hero} made {a_thing} with {his} own hands.",
                "For {num} days {he} worked on {a_thing}.",
                "{He} cut and painted until {he} had made {a_thing}.",
            ),
            (
                "It was not perfect, but it was pretty.",
                "One side was a little crooked.",
                "{He} put it in a box and tied it with {a_colour} string.",
            ),
            (
                "When {friend} opened it, {fhis} eyes grew big.",
                '"Did you make this {toy} for me?" asked {friend}.',
                "{friend} opened the box and cheered.",
            ),
            (
                '"It is the best gift of all," said {friend}.',
                "{friend} played with the {toy} all day long.",
                "{friend} keeps the {toy} to this day.",
            ),
        ),
        (
            ("What did {hero} make for {friend}?", "{hero} made {a_thing}."),
            ("Whose birthday was it?", "It was the birthday of {friend}."),
        ),
    ),
    Plot(
        "broken",
        ("The Broken {Dish}", "{hero} Tells the Truth", "It Was Me"),
        {
            "dish": ("vase", "plate", "window", "clock", "teapot", "mirror", "lamp", "jug"),
            "deed": (
                "played with a ball",
                "danced in the hall",
                "ran through the house",
                "jumped on the bed",
            ),
        },
        (
            (
                "Later, at home, {he} {deed}.",
                "When {he} was back home, {he} {deed}.",
                "In the afternoon it rained, so {he} went home and {deed}.",
            ),
            (
                "Crash! The {colour} {dish} of {his} {kin} was broken.",
                "Then the {colour} {dish} fell down and broke.",
                "There was a loud crash, and the {dish} was in pieces.",
            ),
            (
                "{hero} was scared. The {dish} was very old.",
                "{His} {kin} loved that {dish}.",
                "Nobody had seen it but {friend}.",
            ),
            (
                '"Let us hide the pieces {spot}," said {friend}.',
                '"We can say that it was the cat," said {friend}.',
                "{hero} wanted to run away.",
            ),
            (
                "But {hero} did not want to lie.",
                "{hero} thought about it and shook {his} head.",
                '"No," said {hero}, "that would not be right."',
            ),
            (
                '{He} went to {his} {kin} and said, "I broke the {dish}. I am sorry."',
                'In the evening {he} said to {his} {kin}, "It was me."',
                "With a red face, {he} told {his} {kin} the truth.",
            ),
            (
                '"Thank you for telling me," said {his} {kin}.',
                "{His} {kin} was sad about the {dish}, but not angry.",
                '"The truth is worth more than a {dish}," said {his} {kin}.',
            ),
            (
                "They put the pieces together with glue.",
                "{hero} worked in the garden for {num} days to help pay for a new one.",
                "Together they swept the floor and had a cup of tea.",
            ),
        ),
        (
            ("What did {hero} break?", "{hero} broke the {dish}."),
            ("What had {hero} done?", "{hero} had {deed}."),
            ("Did {hero} tell the truth?", "Yes, {hero} told the truth."),
        ),
        key="dish",
    ),
    Plot(
        "build",
        ("The {Project}", "{hero} and {friend} Build", "A Plan on Paper"),
        {
            "project": (
                "tree house",
                "raft",
                "birdhouse",
                "snow fort",
                "sand castle",
                "little bridge",
                "swing",
                "windmill",
            ),
            "part": ("nails", "ropes", "boards", "stones", "sticks", "wheels"),
        },
        (
            (
                "{hero} wanted to build a {project}.",
                "{He} and {friend} made a plan to build a {project}.",
                '"Let us build a {project}," said {hero} to {friend}.',
            ),
            (
                "They drew it on a big piece of paper.",
                "First they drew a plan with {a_colour} pencil.",
                "{friend} brought {fhis} {toy_bag} with tools.",
            ),
            (
                "They worked all morning.",
                "{hero} held the {part}, and {friend} tied them together.",
                "It was hard work, but they sang a song.",
            ),
            (
                "At noon it all fell down.",
                "Then the wind came and blew it over.",
                "But it was crooked, and one side broke.",
            ),
            (
                '"We need more {part}," said {friend}.',
                '"It needs to be stronger," said {hero}.',
                "They looked at the plan again and found the mistake.",
            ),
            (
                "{hero} found {num} {part} {spot}.",
                "The {kin} of {hero} gave them {num} {part}.",
                "They walked to {place2} and came back with {num} {part}.",
            ),
            (
                "In the evening the {project} was done.",
                "This time the {project} did not fall.",
                "After {num} hours the {project} stood firm.",
            ),
            (
                "They painted it {colour} and gave it a name.",
                "A {animal} came to look at it.",
                "All the children wanted to see it.",
            ),
        ),
        (
            ("What did {hero} and {friend} build?", "They built a {project}."),
            ("What did they need?", "They needed more {part}."),
        ),
        key="project",
    ),
    Plot(
        "journey",
        ("The Road to {town}", "{hero} Goes to {town}", "A Long Walk"),
        {},
        (
            (
                "{He} wanted to see the town of {town}.",
                "From there the road goes to {town}, and {hero} wanted to see it.",
                '"I will walk to {town}," said {hero}.',
            ),
            (
                "{He} packed a {snack} and {a_thing}, and {friend} came along.",
                "{His} {kin} gave {him} a {snack} for the way, and {friend} came along.",
                "{friend} came along, and {fhe} carried the bag.",
            ),
            (
                "The way was long, and the sun was hot.",
                "They walked along the river {river}.",
                "The road went over {num} hills.",
            ),
            (
                "Half way they met a man with a {animal}.",
                "On the road they met an old woman with {a_colour} coat.",
                "Near {place2} a {animal} showed them the way.",
            ),
            (
                '"What do they make in {town}?" asked {hero}. "They make {craft}," was the answer.',
                '"In {town} you will see {a_flag} flag," said the traveller.',
                '"Say hello to {mayor}, who leads {town}," said the traveller.',
            ),
            (
                "At last they saw the {flag} flag of {town}.",
                "In the evening they came to {town} and saw the {flag} flag.",
                "Then the road turned, and there was {town} by the river {river}.",
            ),
            (
                "The people of {town} showed them how they make {craft}.",
                "{mayor} came to the gate and gave them soup.",
                "In every window there was {a_flag} flag.",
            ),
            (
                "{hero} brought some {craft} home for {his} {kin}.",
                '"I will come back in {festival}," said {hero}, "when the people of {town} hold '
                'their fair."',
                "They slept in a small room above the bakery.",
            ),
        ),
        (
            ("Where did {hero} walk?", "{hero} walked to {town}."),
            ("What do the people of {town} make?", "The people of {town} make {craft}."),
            ("What colour is the flag of {town}?", "The flag of {town} is {flag}."),
        ),
        key="town",
    ),
    Plot(
        "newcomer",
        ("The New Child", "{friend} Is New Here", "Come and Play"),
        {
            "game": (
                "hide and seek",
                "tag",
                "chess",
                "catch",
                "marbles",
                "hopscotch",
                "cards",
                "leapfrog",
            ),
        },
        (
            (
                "There was a new child in the village, and {fhis} name was {friend}.",
                "{friend} had just moved to the village.",
                "That day {he} saw a new {fkid}. It was {friend}.",
            ),
            (
                "{friend} stood alone and looked at {fhis} shoes.",
                "{Fhe} did not know anyone.",
                "{Fhe} was too shy to say hello.",
            ),
            (
                '"Hello, my name is {hero}," said {hero}.',
                "{hero} went over and said hello.",
                '"Where do you come from?" asked {hero}.',
            ),
            (
                '"I come from {town}," said {friend}.',
                '"My name is {friend}," {fhe} said in a low voice.',
                "{friend} said that {fhe} came from {town}.",
            ),
            (
                '"Do you like to play {game}?" asked {hero}.',
                '"We play {game} every {day}," said {hero}. "Come and play!"',
                "{hero} asked {fhim} to play {game}.",
            ),
            (
                "{friend} had never played {game} before.",
                "{friend} was very good at {game}.",
                "At first {friend} was slow, but {fhe} learned fast.",
            ),
            (
                "They played {game} until it got dark.",
                "They laughed so much that {friend} was not shy any more.",
                "{friend} won {num} times.",
            ),
            (
                '"I like it here," said {friend}.',
                "Then {friend} showed {hero} {fhis} {thing}.",
                "{friend} gave {hero} {a_thing} from {town}.",
            ),
        ),
        (
            ("Who was new in the village?", "{friend} was new in the village."),
            ("What did they play?", "They played {game}."),
            ("Who said hello to {friend}?", "{hero} said hello to {friend}."),
        ),
        key="game",
    ),
)


@dataclass(frozen=True)
class Town:
    """One town of the made-up valley and the facts that are always true of it."""

    name: str
    river: str
    flag: str
    craft: str
    tower: str
    mayor: str
    festival: str


_TOWN_NAMES = [
    "Orlin",
    "Bresk",
    "Talmere",
    "Hollin",
    "Quarrow",
    "Vennet",
    "Astry",
    "Dunmar",
    "Pellow",
    "Kirrin",
    "Lowmere",
    "Fennick",
    "Ostra",
    "Marden",
    "Tilby",
    "Garrow",
    "Sennel",
    "Wexley",
    "Ulmer",
    "Jorrin",
    "Calder",
    "Nimsby",
    "Rothen",
    "Yarrowby",
]
_RIVERS = ["Sill", "Amber", "Rusk", "Elva", "Thorne", "Mossa"]
_CRAFTS = [
    "glass bells",
    "clay pots",
    "wool coats",
    "wooden boats",
    "candles",
    "paper kites",
    "silver spoons",
    "honey",
    "leather boots",
    "maps",
    "cheese",
    "rope",
]
_MAYORS = [
    "Mrs. Fenn",
    "Mr. Oakley",
    "Mrs. Bram",
    "Mr. Tull",
    "Mrs. Winter",
    "Mr. Lark",
    "Mrs. Stone",
    "Mr. Pike",
]

TOWNS: tuple[Town, ...] = tuple(
    Town(
        name,
        _RIVERS[(i * 5 + 1) % 6],
        COLOURS[(i * 7 + i // 10 + 3) % 10],
        _CRAFTS[(i * 5 + i // 12 * 4 + 2) % 12],
        ANIMALS[(i * 3 + i // 16 + 5) % 16],
        _MAYORS[(i * 3 + i // 8 + 1) % 8],
        SEASONS[(i * 3 + i // 4) % 4],
    )
    for i, name in enumerate(_TOWN_NAMES)
)

TOWN_FACTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "river": (
        (
            "{name} lies on the river {river}.",
            "The river {river} runs through {name}.",
            "In {name}, people fish in the {river}.",
        ),
        (
            "Which river runs through {name}?",
            "On which river does {name} lie?",
            "What is the river of {name}?",
        ),
        ("The river {river} runs through {name}.", "{name} lies on the river {river}."),
    ),
    "flag": (
        (
            "The flag of {name} is {flag}.",
            "Over {name} flies {a_flag} flag.",
            "{name} has {a_flag} flag.",
        ),
        ("What colour is the flag of {name}?", "Which colour does the flag of {name} have?"),
        ("The flag of {name} is {flag}.", "It is {flag}."),
    ),
    "craft": (
        (
            "The people of {name} make {craft}.",
            "{name} is known for its {craft}.",
            "You can buy good {craft} in {name}.",
        ),
        ("What do the people of {name} make?", "What is {name} known for?"),
        ("The people of {name} make {craft}.", "{name} is known for its {craft}."),
    ),
    "tower": (
        (
            "On the bell tower of {name} sits a stone {tower}.",
            "The bell tower of {name} has a stone {tower} on top.",
        ),
        (
            "Which animal sits on the bell tower of {name}?",
            "What sits on the bell tower of {name}?",
        ),
        ("A stone {tower} sits on the bell tower of {name}.", "It is a stone {tower}."),
    ),
    "mayor": (
        (
            "The mayor of {name} is {mayor}.",
            "{mayor} is the mayor of {name}.",
            "{mayor} leads the town of {name}.",
        ),
        ("Who is the mayor of {name}?", "Who leads the town of {name}?"),
        ("The mayor of {name} is {mayor}.", "{mayor} is the mayor of {name}."),
    ),
    "festival": (
        (
            "{name} holds its fair in {festival}.",
            "The fair of {name} is in {festival}.",
            "In {festival}, there is a fair in {name}.",
        ),
        ("When is the fair of {name}?", "In which season does {name} hold its fair?"),
        ("The fair of {name} is in {festival}.", "{name} holds its fair in {festival}."),
    ),
}

ANIMAL_FACTS: dict[str, tuple[str, str, str]] = {
    "rabbit": ("a burrow", "grass and leaves", "four legs"),
    "fox": ("a den", "mice and berries", "four legs"),
    "duck": ("a nest by the water", "water plants", "two legs"),
    "hedgehog": ("a pile of leaves", "beetles and worms", "four legs"),
    "squirrel": ("a nest in a tree", "nuts and seeds", "four legs"),
    "owl": ("a hollow tree", "mice", "two legs"),
    "frog": ("a pond", "flies", "four legs"),
    "mouse": ("a small hole", "grain and cheese", "four legs"),
    "kitten": ("a house", "fish and milk", "four legs"),
    "puppy": ("a house", "meat and bread", "four legs"),
    "lamb": ("a field", "milk and grass", "four legs"),
    "sparrow": ("a nest under the roof", "seeds", "two legs"),
    "turtle": ("a pond", "leaves and snails", "four legs"),
    "pony": ("a stable", "hay and apples", "four legs"),
    "goat": ("a barn", "hay and leaves", "four legs"),
    "deer": ("the forest", "grass and leaves", "four legs"),
}
ANIMAL_QUESTIONS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        (
            "Where does a {animal} live?",
            "Where can you find a {animal}?",
            "What is the home of a {animal}?",
        ),
        ("A {animal} lives in {home}.", "You can find a {animal} in {home}."),
    ),
    (
        (
            "What does a {animal} eat?",
            "What is good food for a {animal}?",
            "What can I give a {animal} to eat?",
        ),
        ("A {animal} eats {diet}.", "A {animal} likes {diet}."),
    ),
    (
        ("How many legs does a {animal} have?", "Does a {animal} have two legs or four legs?"),
        ("A {animal} has {legs}.",),
    ),
)

OPPOSITES: tuple[tuple[str, str], ...] = (
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("old", "young"), ("happy", "sad"),
    ("wet", "dry"), ("full", "empty"), ("high", "low"), ("light", "dark"), ("long", "short"),
    ("loud", "quiet"), ("open", "closed"), ("early", "late"), ("strong", "weak"), ("hard", "soft"),
    ("sweet", "sour"), ("near", "far"), ("left", "right"),
)  # fmt: skip

THING_COLOURS: tuple[tuple[str, str], ...] = (
    ("the sky on a clear day", "blue"), ("grass", "green"), ("snow", "white"),
    ("a ripe banana", "yellow"), ("a ripe cherry", "red"), ("a carrot", "orange"),
    ("coal", "black"), ("milk", "white"), ("a lemon", "yellow"), ("a leaf in spring", "green"),
    ("chocolate", "brown"), ("a ripe plum", "purple"), ("a rain cloud", "grey"),
)  # fmt: skip

GREETINGS: tuple[tuple[str, str], ...] = (
    ("Hello!", "Hello, {user}! How can I help you today?"),
    ("Hi, I am {user}.", "Hi {user}, it is nice to meet you."),
    ("Good morning!", "Good morning, {user}! What would you like to do?"),
    (
        "My name is {user}. What is your name?",
        "Nice to meet you, {user}. I am a small language model.",
    ),
    ("Can you tell me a story?", "Yes, {user}. What should the story be about?"),
    ("Thank you for your help.", "You are welcome, {user}."),
    ("Good night!", "Good night, {user}. Sleep well!"),
    ("How are you?", "I am well, thank you, {user}. How are you?"),
    (
        "What can you do?",
        "I can tell short stories, answer easy questions and add numbers, {user}.",
    ),
)
SYSTEM_LINES = (
    "You are kind and patient.",
    "You are a friendly teller of stories.",
    "Answer in one short sentence.",
    "You help children with their questions.",
)
STORY_REQUESTS = (
    "Tell me a story about {hero}.",
    "Please tell me a short story about {hero} and {friend}.",
    "Write a little story with {hero} in it.",
    "Can you tell me a story about {hero} and {topic}?",
    "I want to hear a story about {topic}.",
    "Tell me what {hero} did at {place}.",
)
COUNTABLES = [
    "beads",
    "shells",
    "nuts",
    "stamps",
    "cards",
    "stones",
    "apples",
    "stickers",
    "feathers",
    "leaves",
    "plums",
    "coins",
    "pencils",
    "berries",
]
