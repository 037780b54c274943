"""Any image model made measurable: its weights, its preprocessing, its class names.

>>> subject = load("resnet18", pretrained=False, device="cpu")
>>> subject.preprocessing.input_size, subject.answers, subject.class_names[:2]
((224, 224), 1000, ('tench', 'goldfish'))
"""

from spatially.subject.loading import load
from spatially.subject.preprocessing import Preprocessing
from spatially.subject.subject import Subject

__all__ = ["Preprocessing", "Subject", "load"]
