"""Turn values that are no tensors into plain JSON and back. Knows a closed list of types; knows nothing of files.

Each kind of value has a module, which encodes and decodes it: `scalars`, `containers`, `times`, `arrays`, `tensors`,
`classes`.

Nothing is pickled, evaluated or imported by a name that stands in the data. A type that is not in the table is refused
when it is saved, with the place where it was found; it is never stored as something that is only alike. torch and numpy
are imported only when a value or a tag needs them.

The stored form. A value that JSON has is that JSON value. Every other value is an object with exactly one key, its tag:

    value                                   stored as
    --------------------------------------  --------------------------------------------------------------------------
    None, bool                              null, true, false
    int, signed 64 bit                      a JSON number without fraction or exponent
    int, larger                             {"$int": "-0x1f..."}, at most 65,536 hex digits
    float, finite                           a JSON number with a fraction or an exponent, shortest exact form
    float, nan or infinite                  {"$float": "7ff8000000000000"}, the IEEE 754 bits, big end first
    str                                     a JSON string
    str with lone surrogates                {"$str": BASE64 of UTF-8 with "surrogatepass"}
    list                                    a JSON array
    dict, its keys str without a leading $  a JSON object, in order
    dict, other                             {"$dict": [[KEY, VALUE], ...]}
    OrderedDict                             {"$ordereddict": {"items": [[KEY, VALUE], ...]}}, and "metadata": VALUE
                                            where it has torch's attribute _metadata
    Counter                                 {"$counter": [[KEY, VALUE], ...]}
    defaultdict                             {"$defaultdict": {"factory": NAME or null, "items": [[KEY, VALUE], ...]}},
                                            NAME one of bool, dict, float, int, list, set, str
    deque                                   {"$deque": {"items": [...], "maxlen": INT or null}}
    tuple                                   {"$tuple": [...]}
    set, frozenset                          {"$set": [...]}, {"$frozenset": [...]}, sorted by their JSON text
    bytes, bytearray                        {"$bytes": BASE64}, {"$bytearray": BASE64}
    io.BytesIO                              {"$bytesio": {"data": BASE64, "position": INT}}
    complex                                 {"$complex": [FLOAT, FLOAT]}
    range                                   {"$range": [INT, INT, INT]}
    slice                                   {"$slice": [START, STOP, STEP]}, each an int or null
    datetime                                {"$datetime": {"iso": "2024-12-31T23:59:59.000001", "tz": TZ, "fold": 0}}
    time                                    {"$time": {"iso": "23:59:59", "tz": TZ, "fold": 0}}
    ... TZ                                  null, {"zone": "Europe/Berlin"} or {"offset_microseconds": INT}, and "name":
                                            TEXT where the fixed offset was given a name
    date                                    {"$date": "2024-12-31"}
    timedelta                               {"$timedelta": [DAYS, SECONDS, MICROSECONDS]}
    decimal.Decimal                         {"$decimal": "1.50E+7"}, at most 65,536 characters
    uuid.UUID                               {"$uuid": "xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"}
    pathlib.Path, PosixPath                 {"$path": TEXT}, gives back a Path
    pathlib.PurePosixPath                   {"$purepath": TEXT}, gives back a PurePosixPath
    torch.Tensor                            {"$tensor": LEAF}, the tensor itself lies in the tensor files
    tensor of a wrapper subclass            {"$subclass": {"name": NAME, "dtype": "float32", "shape": [...],
                                            "stride": [...], "shards": INT, "context": VALUE, "tensors": {ATTRIBUTE:
                                            VALUE, ...}}}: what its __tensor_flatten__ gives. Each value of the tensors
                                            is this form or that of a torch.Tensor
    torch.dtype, Size, device               {"$dtype": "bfloat16"}, {"$size": [...]}, {"$device": "cuda:0"}
    numpy scalar                            {"$scalar": {"dtype": "<f4", "data": BASE64}}; dtype "S" and "U" for bytes_
                                            and str_, whose data is then the bytes or the UTF-8 text
    numpy array                             {"$ndarray": {"dtype": "<i8", "shape": [...], "data": BASE64}}, row-major;
                                            {"$ndarray": {"dtype": "<i8", "tensor": LEAF}} when it has more than 1,024
                                            bytes and torch has the type (the tensor is in the machine's byte order)
    registered enum                         {"$type": {"name": NAME, "value": MEMBER}}
    registered enum.Flag                    {"$type": {"name": NAME, "value": [MEMBER, ...]}}
    registered dataclass, NamedTuple        {"$type": {"name": NAME, "fields": {FIELD: VALUE, ...}}}

In a context, classes need not be registered: it is compared with that of a live tensor, and a device has no index.
KEY is a stored value that can be hashed and holds no tensor. Types match exactly: a subclass is another type. Values
nest at most 100 deep. Objects that were shared come back as separate equal ones.

Errors when reading. A form that this table does not allow is a CorruptCheckpointError; a tag that is not in it, or a
torch dtype or device that this torch does not have, an UnsupportedFormatError; a registered type whose name, members or
fields are not those of the running program, a StateMismatchError: a field that was added or removed is never guessed.
"""

from holdfast.ondisk.codec.decoding import decode
from holdfast.ondisk.codec.display import plain, typed
from holdfast.ondisk.codec.encoding import encode
from holdfast.ondisk.codec.forms import MAX_DEPTH, Flattened, Json, Subclass
from holdfast.ondisk.codec.registry import class_name, is_registered, register_type, registered_tensor
from holdfast.ondisk.codec.tensors import subclass_of

__all__ = [
    "MAX_DEPTH",
    "Flattened",
    "Json",
    "Subclass",
    "class_name",
    "decode",
    "encode",
    "is_registered",
    "plain",
    "register_type",
    "registered_tensor",
    "subclass_of",
    "typed",
]
