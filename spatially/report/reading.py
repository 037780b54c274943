"""What each measurement asks, and how to read its figures: for a reader who has not read the papers."""

# Probe → its question, and what high, low, left or right mean.
READING = {
    "sensitivity": (
        "How much of the accuracy rests on where things are, how much on which pieces there are?",
        "A line that stays up while blocks are shuffled belongs to a model that does without their arrangement. Where it"
        " ends, at α = 1, gives structure reliance; how early it falls, the sensitivity area.",
    ),
    "paste": (
        "Shown a shuffled image with a clean one in its centre, which of the two does a model name?",
        "Orange is the shuffled host, whose pieces cover most of the picture; blue the clean guest, whose structure is"
        " whole. Compare the two: naming neither says that the mixture confuses the model.",
    ),
    "fourier": (
        "Does a model smooth its feature maps or sharpen them, and where?",
        "Low is smooth: fine detail has been averaged away. A line that falls over the grey stripes is attention at"
        " averaging; convolutions usually let it rise.",
    ),
    "variance": (
        "How much do the positions of a feature map differ from each other, by depth?",
        "A line that falls over the grey stripes is attention at averaging. Scales differ from model to model: compare the"
        " shapes of the lines, not their heights.",
    ),
    "receptive_field": (
        "Which pixels does one position of the last feature map listen to?",
        "Bright pixels move it most. A compact spot is a local view, a field over the whole image a global one. Square"
        " patterns are the patches.",
    ),
    "position_bias": (
        "What has a model learned about where things are, before it sees an image?",
        "A bright spot around the query says that near patches count more than far ones; R² says how much of the map a"
        " Gaussian explains. Maps that look like noise hold no simple notion of distance.",
    ),
    "interaction_ratio": (
        "To how much of the image does a position attend?",
        "Near 100 % a layer is global, near 0 % local. Models are drawn over their relative depth.",
    ),
    "frequency_noise": (
        "Which frequencies does a model need?",
        "A high drop at low frequencies is typical of a model that reads coarse shapes, one at high frequencies of a model"
        " that reads texture.",
    ),
    "hessian": (
        "How sharply does the training loss curve around the weights?",
        "Values near 0 are flat directions, large ones sharp, negative ones lead downwards. Few mini-batches give wide"
        " intervals.",
    ),
    "landscape": (
        "How does the loss rise around the weights?",
        "The wider the dark valley around the cross, the less a model minds being moved. A rise below 0 says that the loss"
        " is lower elsewhere on these images, as augmentation changes them.",
    ),
    "interpolation": (
        "Is there a barrier on the straight line between two checkpoints?",
        "A line without a hump connects weights of one valley.",
    ),
    "robustness": (
        "How much accuracy is left when images are harder?",
        "The distance from the grey tick to the dot is what a test costs. The triangle on the axis is the accuracy"
        " of guessing.",
    ),
    "shape_bias": (
        "When shape and texture disagree, which of them does a model name?",
        "To the right is shape, to the left texture. Read it beside the share of images that were decided at all.",
    ),
    "cost": (
        "What does a model cost?",
        "In the panels of speed up is faster, in that of memory up is more. Speed depends on the machine and on what else"
        " it did.",
    ),
}
