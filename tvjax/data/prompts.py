"""Prompt templates of the vision tasks, those of CLIP (arXiv:2103.00020) where it has the task."""
import functools

_A_THE = ("a", "the")
_LOOKS = ("a photo of {article} {{}}.", "a blurry photo of {article} {{}}.",
          "a black and white photo of {article} {{}}.", "a low contrast photo of {article} {{}}.",
          "a high contrast photo of {article} {{}}.", "a bad photo of {article} {{}}.",
          "a good photo of {article} {{}}.", "a photo of {small} small {{}}.", "a photo of {small} big {{}}.")
_AERIAL = ("satellite imagery", "aerial imagery", "satellite photo", "aerial photo", "satellite view", "aerial view")
_MEDIA = ("a photo of", "a painting of", "a plastic", "a sculpture of", "a sketch of", "a tattoo of", "a toy",
          "a rendition of", "a embroidered", "a cartoon", "a {} in a video game.", "a plushie", "a origami", "art of",
          "graffiti of", "a drawing of", "a doodle of")
_KINDS = ("a photo of", "a video of", "a example of", "a demonstration of")
_DOING = ("", "using ", "doing ", "during ", "performing ", "practicing ")


def _looks() -> tuple[str, ...]:
    return tuple(one.format(article=article, small=article) for article in _A_THE for one in _LOOKS)


def _things() -> tuple[str, ...]:
    return tuple(f"a photo of {article} {{}} {thing}." for article in _A_THE
                 for thing in ("texture", "pattern", "thing", "object"))


def _from_above() -> tuple[str, ...]:
    return tuple(f"{kind} of {article}{{}}." for article in ("", "a ", "the ") for kind in _AERIAL)


def _media() -> tuple[str, ...]:
    made = []
    for article in _A_THE:
        for one in _MEDIA:
            if "{}" in one:
                made.append(one if article == "a" else one.replace("a {}", "the {}"))
            elif one.endswith("of"):
                made.append(f"{one} {article} {{}}.")
            else:
                made.append(f"{one} {{}}." if article == "a" else f"the {one.removeprefix('a ')} {{}}.")
    return tuple(made)


def _actions() -> tuple[str, ...]:
    return tuple(f"{kind} {article} person {doing}{{}}." for kind in _KINDS for article in _A_THE for doing in _DOING)


def _imagenet() -> tuple[str, ...]:
    from tvjax.data import vision
    return tuple(template("{}") for template in vision._of_open_clip().OPENAI_IMAGENET_TEMPLATES)


def _these(*templates: str):
    return functools.partial(tuple, templates)


_NUMBER = _these('a photo of the number: "{}".')
_CHARACTER = _these('a photo of the digit character: "{}".')
_PLAIN = _these("a photo of a {}.", "a photo of the {}.")
TEMPLATES = {
    "cars": _these("a photo of a {}.", "a photo of the {}.", "a photo of my {}.", "i love my {}!",
                   "a photo of my dirty {}.", "a photo of my clean {}.", "a photo of my new {}.",
                   "a photo of my old {}."),
    "dtd": _things,
    "eurosat": _these("a centered satellite photo of {}.", "a centered satellite photo of a {}.",
                      "a centered satellite photo of the {}."),
    "gtsrb": _these('a zoomed in photo of a "{}" traffic sign.', 'a centered photo of a "{}" traffic sign.',
                    'a close up photo of a "{}" traffic sign.'),
    "mnist": _NUMBER, "svhn": _NUMBER,
    "resisc45": _from_above,
    "sun397": _PLAIN, "stl10": _PLAIN, "fashion_mnist": _PLAIN, "cifar10": _looks, "cifar100": _looks,
    "flowers102": _these("a photo of a {}, a type of flower."),
    "pets": _these("a photo of a {}, a type of pet."),
    "pcam": _these("this is a photo of {}"),
    "fer2013": _these("a photo of a {} looking face.", "a photo of a face showing the emotion: {}.",
                      "a photo of a face looking {}.", "a face that looks {}.", "they look {}.",
                      "look at how {} they are."),
    "emnist_digits": _CHARACTER, "emnist_letters": _CHARACTER,
    "food101": _these("a photo of {}, a type of food."),
    "rendered_sst2": _these("a {} review of a movie."),
    "kmnist": _these("a photo of the character {}."),
    "imagenet": _imagenet,
    "caltech101": _media, "caltech256": _media,
    "aircraft": _these("a photo of a {}, a type of aircraft.", "a photo of the {}, a type of aircraft."),
    "cub200": _these("a photo of a {}, a type of bird."),
    "voc2007": _these("a photo of a {}."),
    "country211": _these("a photo i took in {}.", "a photo i took while visiting {}.",
                         "a photo from my home country of {}.", "a photo from my visit to {}.",
                         "a photo showing the country of {}."),
    "ucf101": _actions,
}
"""{task: a function that gives its templates, each with one {} for the class name}."""
