"""The model table: one entry per architecture, data only, one file per family.

Size `full` is the published configuration that the description names, `small` has 10 to 40 million parameters, `tiny`
gives a file below 1 MB. "As in" marks an entry that has the operators of that architecture, at size `tiny` only.
"""

from models.architectures.audio import AUDIO
from models.architectures.decoders import DECODERS
from models.architectures.encoder_decoders import ENCODER_DECODERS
from models.architectures.encoders import ENCODERS
from models.architectures.experts import EXPERTS
from models.architectures.plain import PLAIN
from models.architectures.vision import VISION
from models.entry import Entry

ARCHITECTURES: tuple[Entry, ...] = (*DECODERS, *EXPERTS, *ENCODERS, *ENCODER_DECODERS, *VISION, *AUDIO, *PLAIN)
