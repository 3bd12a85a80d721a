"""The state of a tau2 world. A world is tau2's own `Environment` over databases of its own.

Every world is a fork of a template that is loaded once per process. Small databases (telecom, mock) are copied whole.
The large ones (retail, airline) are copy-on-write: tables share the template's records, and a record is copied when a
tool first reaches for it by key. The toolkits iterate over tables only to read; a test pins that.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
from collections.abc import ItemsView, Iterator, MutableMapping, ValuesView
from functools import cache
from types import NoneType
from typing import Any

from pydantic import BaseModel
from tau2.domains.telecom.tools import TelecomTools
from tau2.domains.telecom.user_data_model import PerformanceLevel, TelecomUserDB, VpnDetails
from tau2.domains.telecom.user_tools import TelecomUserTools
from tau2.environment.db import DB
from tau2.environment.environment import Environment
from tau2.environment.toolkit import ToolKitBase
from tau2.utils import get_dict_hash

from sinkflex.seeds import seed_for

_LARGE = ("retail", "airline")


class SeededTelecomTools(TelecomTools):
    """Telecom's tools, with a bill id that is a function of the state where the package draws a random one."""

    def _apply_one_time_charge(self, customer_id: str, amount: float, description: str) -> None:
        bills_before = len(self.db.bills)
        super()._apply_one_time_charge(customer_id, amount, description)
        if len(self.db.bills) > bills_before:
            customer, bill = self.get_customer_by_id(customer_id), self.db.bills[-1]
            bill.bill_id = f"B{seed_for(0, 'bill', customer_id, bills_before) % 2**32:08x}"
            customer.bill_ids[-1] = bill.bill_id


class IsolatedPhoneTools(TelecomUserTools):
    """The telecom user's tools, with VPN details of its own.

    The package keeps them on the class and a fault of one task ("bad VPN") changes them in place, so every later
    episode of the process would reconnect to the slow VPN.
    """

    def __init__(self, db: TelecomUserDB) -> None:
        super().__init__(db)
        self.default_vpn_details = VpnDetails(
            server_address="192.168.1.1", protocol="OpenVPN", server_performance=PerformanceLevel.EXCELLENT
        )


class RecordTable(MutableMapping):
    """A copy-on-write table: the template's records, and the records this world has reached for.

    Attributes:
        base: record by key, shared by all worlds of the process and never written to.
        own: records that belong to this world.
    """

    def __init__(self, domain: str, name: str, own: dict[str, BaseModel]) -> None:
        self.domain, self.name, self.own = domain, name, own
        self.base: dict[str, BaseModel] = _records(domain)[name]

    def __getitem__(self, key: str) -> BaseModel:
        if key not in self.own:
            self.own[key] = copy.deepcopy(self.base[key])
        return self.own[key]

    def __setitem__(self, key: str, record: BaseModel) -> None:
        self.own[key] = record

    def __delitem__(self, key: str) -> None:
        raise NotImplementedError("no tau2 tool deletes a record")

    def __contains__(self, key: object) -> bool:
        return key in self.own or key in self.base

    def __iter__(self) -> Iterator[str]:
        return iter({**self.base, **self.own})

    def __len__(self) -> int:
        return len(self.base) + sum(key not in self.base for key in self.own)

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordTable, (self.domain, self.name, self.own)

    def peek(self, key: str) -> BaseModel | None:
        """Return a record to read, without copying it; None if there is none."""
        return self.own.get(key) or self.base.get(key)

    def items(self) -> ItemsView[str, BaseModel]:
        """Pairs to read: records of the template are not copied."""
        return {**self.base, **self.own}.items()

    def values(self) -> ValuesView[BaseModel]:
        """Records to read: records of the template are not copied."""
        return {**self.base, **self.own}.values()


def new_world(domain: str) -> Environment:
    """Return a world in the domain's default state."""
    world = copy.copy(template(domain))
    for side in ("tools", "user_tools"):
        kind: Any = type(getattr(world, side))
        if kind is not NoneType:
            setattr(world, side, kind(_default_db(domain, side)))
    return world


def fork_world(world: Environment) -> Environment:
    """Return an independent world in the same state."""
    clone = copy.copy(world)
    clone.tools, clone.user_tools = copy.deepcopy((world.tools, world.user_tools))
    return clone


def state_hash(world: Environment) -> tuple[str, str | None]:
    """Return the hashes of the agent's and the user's database, equal to the package's own byte for byte."""
    user = world.user_tools
    return _hash(_db(world.tools)), None if user is None else _hash(_db(user))


def same_state(left: Environment, right: Environment) -> bool:
    """True if both worlds have equal `state_hash`; compares only the records that either has reached for."""
    ours, theirs = _db(left.tools), _db(right.tools)
    tables = [(getattr(ours, name), getattr(theirs, name)) for name in _table_names(ours)]
    if not tables:
        return state_hash(left) == state_hash(right)
    return all(
        _record_json(one.peek(key)) == _record_json(other.peek(key))
        for one, other in tables
        for key in one.own.keys() | other.own.keys()
    )


@cache
def template(domain: str) -> Environment:
    """Return the domain's world in its default state, for its tools and texts: never change it."""
    module = importlib.import_module(f"tau2.domains.{domain}.environment")
    if domain in _LARGE:
        return module.get_environment(db=_default_db(domain, "tools"))
    world = module.get_environment()
    if domain == "telecom":
        world.tools = SeededTelecomTools(world.tools.db)
        world.user_tools = IsolatedPhoneTools(world.user_tools.db)
    return world


def _db(tools: ToolKitBase | None) -> DB:
    assert tools is not None and tools.db is not None
    return tools.db


def _default_db(domain: str, side: str) -> DB:
    if domain in _LARGE:
        tables: dict[str, Any] = {name: RecordTable(domain, name, {}) for name in _records(domain)}
        return type(_database(domain)).model_construct(**tables)
    db_class, text = _default_text(domain, side)
    return db_class.model_validate_json(text)  # 6 times faster than a deep copy


@cache
def _default_text(domain: str, side: str) -> tuple[type[DB], str]:
    db = getattr(template(domain), side).db
    return type(db), db.model_dump_json()


@cache
def _database(domain: str) -> DB:
    return importlib.import_module(f"tau2.domains.{domain}.data_model").get_db()


@cache
def _records(domain: str) -> dict[str, dict[str, BaseModel]]:
    return dict(_database(domain))


def _table_names(db: DB) -> list[str]:
    return [name for name, value in db if isinstance(value, RecordTable)]


def _record_json(record: BaseModel | None) -> str:
    return "" if record is None else json.dumps(record.model_dump(warnings=False), sort_keys=True, default=str)


@cache
def _base_entries(domain: str, name: str) -> dict[str, str]:
    """The template's records as JSON object entries, in key order."""
    return {key: f"{json.dumps(key)}: {_record_json(record)}" for key, record in sorted(_records(domain)[name].items())}


def _hash(db: DB) -> str:
    names = _table_names(db)
    if not names:
        return get_dict_hash(db.model_dump(warnings=False))
    digest = hashlib.sha256()
    for i, name in enumerate(sorted(names)):
        table: RecordTable = getattr(db, name)
        entries = _base_entries(table.domain, name)
        if table.own:
            own = {key: f"{json.dumps(key)}: {_record_json(record)}" for key, record in table.own.items()}
            entries = dict(sorted({**entries, **own}.items())) if own.keys() - entries.keys() else {**entries, **own}
        digest.update(f"{', ' if i else '{'}{json.dumps(name)}: {{{', '.join(entries.values())}}}".encode())
    digest.update(b"}")
    return digest.hexdigest()
