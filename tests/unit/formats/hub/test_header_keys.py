"""The keys of a safetensors header are checked before it is parsed, whatever its values are."""

from __future__ import annotations

import json

import pytest

from holdfast.errors import CorruptCheckpointError, HoldfastError, UnsafeContentError
from holdfast.formats.hub.header_keys import require_sound_keys

ENTRY = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        f'{{"a":{ENTRY}}}',
        f'{{"a":{ENTRY},"b":{ENTRY},"__metadata__":{{"a":"{{[","b":"\\"a\\":","dtype":"x"}}}}',
        f'{{"dtype":{ENTRY}, "shape" : {ENTRY}}}   ',
        f'{{"a[0]{{x}}":{ENTRY},"a\\\\":{ENTRY},"\\\\\\"":{ENTRY}}}',
    ],
)
def test_a_sound_header_passes(text: str) -> None:
    json.loads(text)
    require_sound_keys(text.encode())


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (f'{{"a":{ENTRY},"a":{ENTRY}}}', CorruptCheckpointError, "twice"),
        (f'{{"a":{ENTRY},"\\u0061" :{ENTRY}}}', CorruptCheckpointError, "twice"),
        (f'{{"é":{ENTRY},"\\u00e9":{ENTRY}}}', CorruptCheckpointError, "twice"),
        ('{"a":{"dtype":"U8","shape":[1],"shape":[2],"data_offsets":[0,1]}}', CorruptCheckpointError, "twice"),
        ('{"a":{"dtype":"U8","shape":[[1]],"data_offsets":[0,1]}}', UnsafeContentError, "nested"),
        ('{"a":1,"b":2}', UnsafeContentError, "more names than its 0"),
        (f'{{"a":{ENTRY},"\\x":{ENTRY}}}', CorruptCheckpointError, "no safetensors header"),
    ],
)
def test_a_header_that_readers_differ_about_is_refused(text: str, kind: type[HoldfastError], said: str) -> None:
    with pytest.raises(kind, match=said):
        require_sound_keys(text.encode())


def test_a_name_of_many_characters_takes_no_more_memory_than_it_has_bytes() -> None:
    import tracemalloc

    text = b'{"' + b"\\n" * 4_000_000 + b'":1}'
    tracemalloc.start()
    try:
        require_sound_keys(text)
        assert tracemalloc.get_traced_memory()[1] < 10 * len(text)
    finally:
        tracemalloc.stop()
