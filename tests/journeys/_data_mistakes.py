"""Mistakes in the data, and in the newcomer's own code."""

from __future__ import annotations

from tests.journeys._mistake import Mistake, pack_list, pack_photos, use_code

TABBIES = ("Tabby/1.jpg", "Tabby/2.jpg", "tabby/1.jpg", "tabby/2.jpg")

USER = """
import torch
from torch import nn

def none(images, labels, keys):
    images.mul_(2)

def twice(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2 * num_classes))

class Pair(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layer = nn.Linear(64, num_classes)

    def forward(self, images):
        outputs = self.layer(images.flatten(1))
        return outputs, outputs

def weights(num_classes):
    return torch.zeros(num_classes)

def one_label(images, labels, keys):
    return images, labels[:1]
"""


DATA_MISTAKES = [
    # Data
    Mistake(
        name="pack a folder that is not there",
        command="pack photso out",
        what="there is no such file or folder",
        where="photso: ",
        fix="Name a folder of images",
    ),
    pack_photos(
        "images without class folders",
        ["1.jpg", "2.jpg"],
        "2 images are in the folder itself, so their classes are unknown",
        "Lay them out as CLASS/NAME.jpg",
        status=2,
    ),
    pack_list(
        "boxes in a list",
        "path,label,boxes\na.jpg,cat,1 2 3 4\nb.jpg,dog,5 6 7 8\n",
        "the column 'boxes' would be lost",
        "list.csv: ",
        "--columns path,label",
    ),
    pack_list(
        "a list with a column for the split",
        "path,label,split\na.jpg,cat,train\nb.jpg,dog,val\n",
        "the column 'split' would be lost",
        "list.csv: ",
        "Write one list for each set",
    ),
    pack_list(
        "a list with other names of columns",
        "filename,species\na.jpg,cat\nb.jpg,dog\n",
        "there is no column 'path' (found: 'filename', 'species')",
        "list.csv, line 1: ",
        "--columns path=filename,label=species",
    ),
    pack_list(
        "a list with semicolons",
        "path;label\na.jpg;cat\n",
        "there is no column 'path'",
        "list.csv, line 1: ",
        "Separate the columns with commas",
    ),
    pack_list(
        "a list of images that are not there",
        "path,label\na.jpg,cat\nc.jpg,dog\n",
        "there is no file 'c.jpg'",
        "list.csv, line 3: ",
        "Paths are relative to",
    ),
    pack_photos(
        "images and masks",
        ["images/1.png", "images/2.png", "masks/1.png", "masks/2.png"],
        "'images' and 'masks' look like images and their masks",
        "list them in a CSV",
    ),
    pack_photos(
        "a data set of YOLO",
        ["images/1.png"],
        "'labels' holds no images: it looks like annotations",
        "lay the images out as CLASS/NAME.jpg",
        texts={"photos/labels/1.txt": "0 1 1 1 1"},
    ),
    pack_photos(
        "an empty class",
        ["cat/1.jpg", "dog/1.jpg"],
        "class 'eel' has no image",
        "Put images into the class folder, or remove it",
        texts={"photos/eel/.keep": ""},
    ),
    pack_photos(
        "a text that calls itself .jpg",
        ["cat/1.jpg", "dog/1.jpg"],
        "1 of 3 files is not a readable image",
        "--skip-bad",
        texts={"photos/cat/2.jpg": "hello"},
    ),
    pack_photos(
        "other classes for evaluation",
        ["train/cat/1.jpg", "train/dog/1.jpg", "val/cat/2.jpg", "val/eel/2.jpg"],
        "the classes of eval and train differ (only in train: dog; only in val: eel)",
        "Give both the same class folders",
    ),
    Mistake(
        name="pack twice",
        command="pack digits digits.packed",
        what="this exists",
        where="digits.packed: ",
        fix="--overwrite",
    ),
    Mistake(
        name="a packed folder inside the images",
        command="pack digits digits/packed",
        what="the destination is inside the source",
        where="digits/packed: ",
        fix="Choose a destination outside",
    ),
    pack_photos(
        "init for images without classes",
        ["1.jpg"],
        "1 image is in the folder itself, so its class is unknown",
        "CLASS/NAME.jpg",
        command="init photos",
        status=2,
    ),
    # Warnings
    pack_photos(
        "one class, a folder too high",
        ["all/cat/1.jpg", "all/dog/1.jpg"],
        "All images are of one class (all)",
        "one level too high or too low",
        command="pack photos out --split 0.5",
        where="(all)",
        status=0,
    ),
    pack_photos(
        "Tabby and tabby",
        TABBIES,
        "differ only in capitals",
        "give them one name",
        command="pack photos out --split 0.5",
        where="'Tabby' and 'tabby'",
        status=0,
    ),
    pack_photos(
        "Tabby and tabby, seen by init",
        TABBIES,
        "differ only in capitals",
        "give them one name",
        command="init photos",
        where="'Tabby' and 'tabby'",
        status=0,
    ),
    pack_photos(
        "an image in both sets",
        ["train/cat/1.jpg", "train/dog/1.jpg", "val/dog/2.jpg"],
        "1 of 2 evaluation images is in the training set too",
        "Remove them from one of the sets",
        where="'cat/2.jpg'",
        copies={"photos/val/cat/2.jpg": "photos/train/cat/1.jpg"},
        status=0,
    ),
    pack_photos(
        "nothing held out",
        ["cat/1.jpg", "dog/1.jpg"],
        "There is no evaluation set",
        "--split 0.1",
        where="has not seen",
        status=0,
    ),
    use_code(
        "evaluation on the training set",
        "data.eval=digits.packed/train epochs=0.2",
        "The evaluation set is the training set",
        "digits.packed/train",
        "--split 0.1",
        status=0,
    ),
    use_code(
        "no evaluation set",
        "data.eval= epochs=0.2",
        "There is no evaluation set",
        "data.eval",
        "Set data.eval, or hold images out",
        status=0,
    ),
    # Code of their own
    use_code(
        "a function's name misspelt",
        "model.factory=user.py:twise",
        "has no 'twise'",
        "model.factory: ",
        "Did you mean 'twice'?",
        trains=False,
    ),
    use_code(
        "a package that is not installed",
        "model.factory=tim:create_model",
        "there is no module 'tim'",
        "model.factory: ",
        "Install it, or name a file",
        trains=False,
    ),
    use_code(
        "a network with too many outputs",
        "model.factory=user.py:twice",
        "a tensor of the shape [2, 20], and the data need [2, 10]",
        "model: ",
        "Make the network give 10 outputs",
    ),
    use_code(
        "a network that returns two things",
        "model.factory=user.py:Pair",
        "it gives a tuple of 2, and the data need [2, 10]",
        "model: ",
        "Let it return the tensor of outputs alone",
    ),
    use_code(
        "a factory that returns a tensor",
        "model.factory=user.py:weights",
        "gave a Tensor, no",
        "model.factory: ",
        "Name a function that returns the network",
    ),
    use_code(
        "a transform that returns nothing",
        "transform=user.py:none",
        "the transform 'user.py:none' returned nothing",
        "step 1: ",
        "Return (images, labels), here (float32 [30, 1, 8, 8], int64 [30])",
    ),
    use_code(
        "a transform that loses labels",
        "transform=user.py:one_label",
        "returned (float32 [30, 1, 8, 8], int64 [1])",
        "step 1: ",
        "Return (images, labels), here",
    ),
    use_code(
        "a rate that is far too high",
        "optimizer.lr=1e39 --run hot",
        "the loss is not finite at step",
        "hot: ",
        "a lower optimizer.lr",
        status=1,
    ),
]
