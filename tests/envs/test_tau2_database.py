"""Worlds: copy-on-write, forks, hashes, and equality with the package's own environment."""

from __future__ import annotations

import pickle

import pytest
from tau2.data_model.message import ToolCall as PackageCall

from sinkflex.envs.tau2 import tasks
from sinkflex.envs.tau2.database import RecordTable, fork_world, new_world, same_state, state_hash, template

DOMAINS = ("telecom", "retail", "airline", "mock")


def call(world, name, arguments, requestor="assistant"):
    return world.get_response(PackageCall(id="1", name=name, arguments=arguments, requestor=requestor))


def gold_actions(domain):
    specs = tasks.load(domain, "base")
    return [a for spec in specs for a in tasks.read(domain, spec.task_id).evaluation_criteria.actions or ()]


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_new_world_has_the_packages_hash(domain, new_plain_world):
    plain = new_plain_world(domain)
    assert state_hash(new_world(domain)) == (plain.get_db_hash(), plain.get_user_db_hash())


@pytest.mark.parametrize("domain", ["retail", "airline"])
def test_no_tool_changes_the_shared_records(domain, new_plain_world):
    """The toolkits iterate over tables only to read: every tool runs, with good and bad arguments."""
    used = set()
    world = new_world(domain)
    for action in gold_actions(domain):
        call(world, action.name, action.arguments)
        used.add(action.name)
    if domain == "airline":
        for name in ("search_direct_flight", "search_onestop_flight"):
            call(world, name, {"origin": "JFK", "destination": "SEA", "date": "2024-05-20"})
            used.add(name)
    for name in world.tools.tools.keys() - used:
        call(world, name, {})
    for user in list(world.tools.db.users.values())[:50]:
        call(world, "get_user_details", {"user_id": user.user_id})
    plain = new_plain_world(domain)
    for name, records in plain.tools.db:
        base = getattr(template(domain).tools.db, name).base
        assert base == records, f"a tool changed a shared record of {name}"
    assert not any(table.own for _, table in template(domain).tools.db)
    assert state_hash(world) != state_hash(new_world(domain))


def test_a_table_behaves_like_the_dict_it_stands_for():
    table, mirror = RecordTable("retail", "users", {}), dict(RecordTable("retail", "users", {}).base)
    key = next(iter(mirror))
    table["new"] = mirror["new"] = mirror[key]
    assert list(table) == list(mirror) and len(table) == len(mirror)
    assert list(table.items()) == list(mirror.items()) and list(table.values()) == list(mirror.values())
    assert "new" in table and "absent" not in table and table.get("absent") is None
    assert table[key] == mirror[key] and table[key] is not mirror[key] and table[key] is table[key]
    with pytest.raises(KeyError):
        table["absent"]


def test_writes_to_one_world_are_not_seen_in_another():
    ours, theirs = new_world("retail"), new_world("retail")
    order = next(key for key, order in ours.tools.db.orders.items() if order.status == "pending")
    assert not call(ours, "cancel_pending_order", {"order_id": order, "reason": "no longer needed"}).error
    assert ours.tools.db.orders[order].status == "cancelled"
    assert theirs.tools.db.orders[order].status == "pending"
    assert not same_state(ours, theirs) and same_state(theirs, new_world("retail"))


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_fork_and_its_origin_do_not_touch_each_other(domain):
    actions = gold_actions(domain)
    world = new_world(domain)
    for action in actions[:5]:
        call(world, action.name, action.arguments, action.requestor)
    before = state_hash(world)
    fork, stored = fork_world(world), pickle.loads(pickle.dumps(world))
    assert state_hash(fork) == state_hash(stored) == before
    for action in actions:
        call(fork, action.name, action.arguments, action.requestor)
    assert state_hash(world) == before != state_hash(fork)


def test_a_pickled_world_leaves_the_shared_records_behind():
    assert len(pickle.dumps(new_world("airline"))) < 100_000


def test_equal_hashes_and_equal_states_are_the_same_thing():
    worlds = [new_world("retail") for _ in range(4)]
    for world, action in zip(worlds[1:], gold_actions("retail")[3:], strict=False):
        call(world, action.name, action.arguments)
    for left in worlds:
        for right in worlds:
            assert same_state(left, right) == (state_hash(left) == state_hash(right))


def test_a_broken_vpn_does_not_leak_into_later_worlds():
    broken, later = new_world("telecom"), new_world("telecom")
    broken.user_tools.break_vpn()
    later.user_tools.connect_vpn()
    assert later.user_tools.device.vpn_details.server_performance.value == "excellent"
    fork = fork_world(broken)
    fork.user_tools.disconnect_vpn()
    fork.user_tools.connect_vpn()
    assert fork.user_tools.device.vpn_details.server_performance.value == "poor"  # as in the package, within an episode


def test_a_bill_that_a_tool_opens_gets_a_reproducible_id():
    ids = []
    for _ in range(2):
        world = new_world("telecom")
        drafts = {bill.bill_id for bill in world.tools.db.bills if bill.status.value == "Draft"}
        customer = next(c for c in world.tools.db.customers if c.line_ids and not drafts & set(c.bill_ids))
        arguments = {"customer_id": customer.customer_id, "line_id": customer.line_ids[0], "gb_amount": 1.0}
        assert not call(world, "refuel_data", arguments).error
        bill = world.tools.db.bills[-1]
        assert customer.bill_ids[-1] == bill.bill_id and len(bill.bill_id) == 9
        ids.append(bill.bill_id)
    assert ids[0] == ids[1]
