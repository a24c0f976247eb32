"""Encode and decode dates, times, time zones and durations."""

from __future__ import annotations

import datetime
import re
import sys
from typing import Any

from holdfast.ondisk.codec.decoder import Decoder, TagDecoder, expect, expect_keys, expect_text, shown
from holdfast.ondisk.codec.encoder import Encoder, Handler, unstorable
from holdfast.ondisk.codec.forms import Json
from holdfast.ondisk.codec.places import Place, corrupt
from holdfast.ondisk.codec.scalars import encode_str, expect_integers, expect_string

_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_TIME = re.compile(r"[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{6})?")
_DATETIME = re.compile(rf"{_DATE.pattern}T{_TIME.pattern}")
_ZONE = re.compile(r"[A-Za-z0-9_+-]{1,64}(?:/[A-Za-z0-9_+-]{1,64}){0,4}")


def _encode_datetime(encoder: Encoder, value: datetime.datetime, parent: Place, key: object) -> Json:
    iso, zone = value.replace(tzinfo=None).isoformat(), _encode_zone(encoder, value, parent, key)
    return {"$datetime": {"iso": iso, "tz": zone, "fold": value.fold}}


def _encode_time(encoder: Encoder, value: datetime.time, parent: Place, key: object) -> Json:
    iso, zone = value.replace(tzinfo=None).isoformat(), _encode_zone(encoder, value, parent, key)
    return {"$time": {"iso": iso, "tz": zone, "fold": value.fold}}


def _encode_zone(encoder: Encoder, value: datetime.datetime | datetime.time, parent: Place, key: object) -> Json:
    zone: Any = value.tzinfo
    if zone is None:
        return None
    if type(zone) is datetime.timezone:
        stored: dict[str, Json] = {"offset_microseconds": zone.utcoffset(None) // datetime.timedelta(microseconds=1)}
        unnamed = datetime.timezone(zone.utcoffset(None))
        if zone.tzname(None) != unnamed.tzname(None):
            stored["name"] = encode_str(encoder, zone.tzname(None), parent, key)
        return stored
    zoneinfo = sys.modules.get("zoneinfo")
    if zoneinfo is not None and type(zone) is zoneinfo.ZoneInfo and _ZONE.fullmatch(zone.key or ""):
        return {"zone": zone.key}
    raise unstorable(encoder, value, parent, key, f" with the time zone {zone!r}")


def _encode_date(encoder: Encoder, value: datetime.date, parent: Place, key: object) -> Json:
    return {"$date": value.isoformat()}


def _encode_timedelta(encoder: Encoder, value: datetime.timedelta, parent: Place, key: object) -> Json:
    return {"$timedelta": [value.days, value.seconds, value.microseconds]}


def _decode_datetime(decoder: Decoder, value: Any, parent: Place, key: object) -> datetime.datetime:
    record, zone, fold = _clock(value, _DATETIME, parent, key)
    try:
        return datetime.datetime.fromisoformat(record).replace(tzinfo=zone, fold=fold)
    except ValueError as error:
        raise corrupt(f"no such date and time: {record}", parent, key) from error


def _decode_time(decoder: Decoder, value: Any, parent: Place, key: object) -> datetime.time:
    record, zone, fold = _clock(value, _TIME, parent, key)
    try:
        return datetime.time.fromisoformat(record).replace(tzinfo=zone, fold=fold)
    except ValueError as error:
        raise corrupt(f"no such time: {record}", parent, key) from error


def _clock(value: Any, form: re.Pattern[str], parent: Place, key: object) -> tuple[str, datetime.tzinfo | None, int]:
    record = expect_keys(value, {"iso", "tz", "fold"}, parent, key)
    fold = expect(record["fold"], int, parent, key)
    if fold not in (0, 1):
        raise corrupt(f"a time has the fold {shown(fold)}", parent, key)
    return expect_text(record["iso"], form, parent, key), _zone(record["tz"], parent, key), fold


def _zone(value: Any, parent: Place, key: object) -> datetime.tzinfo | None:
    if value is None:
        return None
    if type(value) is dict and value.keys() == {"zone"}:
        return _named_zone(expect_text(value["zone"], _ZONE, parent, key), parent, key)
    record = expect_keys(value, {"offset_microseconds"}, parent, key, optional="name")
    name = (expect_string(record["name"], parent, key),) if "name" in record else ()
    try:
        offset = datetime.timedelta(microseconds=expect(record["offset_microseconds"], int, parent, key))
        return datetime.timezone(offset, *name)
    except (ValueError, OverflowError) as error:
        raise corrupt(f"no such time zone offset: {shown(record['offset_microseconds'])}", parent, key) from error


def _named_zone(name: str, parent: Place, key: object) -> datetime.tzinfo:
    import zoneinfo

    try:
        return zoneinfo.ZoneInfo(name)
    except (LookupError, ValueError, OSError, ImportError) as error:
        advice = "if it is a real one, this machine's time zone data lacks it: install tzdata"
        raise corrupt(f"no such time zone: {name}", parent, key, advice) from error


def _decode_date(decoder: Decoder, value: Any, parent: Place, key: object) -> datetime.date:
    text = expect_text(value, _DATE, parent, key)
    try:
        return datetime.date.fromisoformat(text)
    except ValueError as error:
        raise corrupt(f"no such date: {text}", parent, key) from error


def _decode_timedelta(decoder: Decoder, value: Any, parent: Place, key: object) -> datetime.timedelta:
    days, seconds, microseconds = expect_integers(value, 3, parent, key)
    try:
        return datetime.timedelta(days, seconds, microseconds)
    except OverflowError as error:
        raise corrupt("a timedelta is out of range", parent, key) from error


ENCODERS: dict[type, Handler] = {
    datetime.datetime: _encode_datetime,
    datetime.time: _encode_time,
    datetime.date: _encode_date,
    datetime.timedelta: _encode_timedelta,
}
DECODERS: dict[str, TagDecoder] = {
    "$datetime": _decode_datetime,
    "$time": _decode_time,
    "$date": _decode_date,
    "$timedelta": _decode_timedelta,
}
