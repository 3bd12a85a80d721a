"""Episodes of the tau2 environment: how they start, who may end them, what a broken user is, and copies."""

from __future__ import annotations

import itertools
import pickle
import threading
from functools import partial

import gymnasium
import pytest
from gymnasium.error import ResetNeeded
from tau2_play import SLOW_DATA, Script, calls, solo, telecom

from sinkflex.config import EnvConfig
from sinkflex.envs.check import check_environment
from sinkflex.envs.env import Action, EnvironmentFault, Message, StopReason, ToolCall
from sinkflex.envs.tau2 import actions, policies, tasks
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.envs.tau2.episode import MAX_USER_ROUNDS
from sinkflex.trajectory import Outcome
from sinkflex.users.user import UserAction, UserStop


@pytest.mark.parametrize(
    "options",
    [
        {"domain": "telecom"},
        {"domain": "mock"},
        {"domain": "telecom", "solo": True},
        {"domain": "mock", "solo": True},
        {"domain": "retail", "solo": True},
        {"domain": "airline", "solo": True},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_the_environment_conforms(options):
    check_environment(partial(Tau2Env, split="base", **options))


class PaysForNothing(Tau2Env):
    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, 1.0 if truncated else reward, terminated, truncated, info


class SharesItsForks(Tau2Env):
    def fork(self):
        return self


class Unseeded(Tau2Env):
    def step(self, action):
        observation, *rest = super().step(action)
        return (*observation, Message("user", str(next(TICKS)))), *rest


class LeavesThreads(Tau2Env):
    def reset(self, *, seed=None, options=None):
        threading.Thread(target=RELEASE.wait, daemon=True).start()
        return super().reset(seed=seed, options=options)


class PassesEmptyWords(Tau2Env):
    def step(self, action):
        return super().step(action if action.text is None or action.text.strip() else Action(text="Hello."))


class GoesOnAfterTheEnd(Tau2Env):
    def step(self, action):
        if self._episode and self._episode.stop_reason:
            self.reset(seed=0)
        return super().step(action)


TICKS = itertools.count()
RELEASE = threading.Event()


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (PaysForNothing, "a truncated episode paid"),
        (SharesItsForks, "a fork does not go on as its origin"),
        (Unseeded, "not equivalent"),
        (LeavesThreads, "left 20 threads"),
        (PassesEmptyWords, "expected an error"),
        (GoesOnAfterTheEnd, "after the end did not raise"),
    ],
)
def test_the_check_names_the_rule_that_is_broken(broken, complaint):
    user = Script([UserAction(text="Okay.")])
    RELEASE.clear()
    try:
        with pytest.raises(AssertionError, match=complaint):
            check_environment(partial(broken, "telecom", user=user, max_turns=30, max_errors=100))
    finally:
        RELEASE.set()


def test_it_runs_in_a_vector_environment():
    vector = gymnasium.vector.SyncVectorEnv([lambda: Tau2Env("telecom", max_turns=3)] * 2)
    observations, _ = vector.reset(seed=0)
    assert len(observations) == 2
    for _ in range(5):
        _, rewards, *_ = vector.step(vector.action_space.sample())
    assert rewards.shape == (2,)
    vector.close()


def test_reset_tells_the_agent_what_it_needs():
    env = Tau2Env("telecom", split="train")
    observation, info = env.reset(seed=0)
    assert observation[0].role == "user" and observation[0].content
    assert info["policy"] == env.policy and "<main_policy>" in env.policy
    assert {tool["function"]["name"] for tool in info["tools"]} >= {"get_customer_by_phone", "refuel_data"}
    assert info["greeting"] == policies.GREETING
    assert info["user"] == "scripted" and info["stop_reason"] is None
    assert info["tags"].keys() == {"family", "faults", "persona"}
    assert info["task_id"] in {spec.task_id for spec in tasks.load("telecom", "train")}


def test_tool_schemas_keep_their_definitions():
    by_name = {tool["function"]["name"]: tool for tool in Tau2Env("airline", solo=True).tools}
    assert "$defs" in by_name["book_reservation"]["function"]["parameters"]


def test_the_seed_decides_task_and_user():
    env = Tau2Env("telecom", split="train")
    drawn = [env.reset(seed=seed)[1]["task_id"] for seed in range(20)]
    assert drawn == [env.reset(seed=seed)[1]["task_id"] for seed in range(20)]
    assert len(set(drawn)) > 5
    env = telecom()
    seeds = []
    for seed in (1, 2, 1):
        env.reset(seed=seed, options={"task_id": SLOW_DATA})
        seeds.append(env.episode.user.seed)
    assert seeds[0] == seeds[2] != seeds[1]


def test_options_choose_domain_split_task_and_user():
    env = Tau2Env("telecom")
    _, info = env.reset(seed=0, options={"domain": "mock", "split": "base", "task_id": "create_task_1"})
    assert (info["domain"], info["task_id"]) == ("mock", "create_task_1")
    assert "create_task" in str(env.action_space)
    _, info = env.reset(options={"user": partial(Script, [UserAction(text="Hi")], "endpoint")})
    assert info["user"] == "endpoint" and info["domain"] == "mock"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Tau2Env("telcom"), ["'telcom'", "'telecom'"]),
        (lambda: Tau2Env("telecom").reset(options={"task": "x"}), ["'task'", "'task_id'"]),
        (lambda: Tau2Env("telecom", policy_text="ful").policy, ["'ful'", "'full'", "short"]),
        (lambda: Tau2Env("telecom").reset(options={"task_id": "x"}), ["'x'", "tasks.load"]),
        (lambda: Tau2Env("telecom", split="tset").reset(), ["'tset'", "'test'"]),
        (lambda: Tau2Env("telecom", user="scriptd").reset(), ["'scriptd'", "'scripted'"]),
        (lambda: telecom().step({"txt": "hi"}), ["'txt'", "'text'"]),
        (lambda: telecom().step("hi"), ["Action", "str"]),
    ],
)
def test_a_users_mistake_is_told_with_what_was_found_and_expected(make, words):
    with pytest.raises(ValueError) as error:
        make()
    assert all(word in str(error.value) for word in words)


def test_policy_texts():
    full, short, none = (Tau2Env("telecom", policy_text=text).policy for text in ("full", "short", "none"))
    assert len(full) > 20_000 > 1_000 > len(short) > 200 and none == ""
    for domain in tasks.DOMAINS:
        assert actions.DONE in Tau2Env(domain, solo=True, policy_text="short").policy
        assert policies.policy(domain, True, "full") != policies.policy(domain, False, "full")


def test_the_user_acts_with_its_own_tools_before_it_speaks():
    act = UserAction(tool_calls=(ToolCall("toggle_data_saver_mode"), ToolCall("run_speed_test")))
    env = telecom(act, UserAction(text="It is fast now."))
    observation, *_ = env.step(Action(text="Please turn off Data Saver."))
    assert observation == (Message("user", "It is fast now."),)
    results = env.episode.user.heard[-1]
    assert "Data Saver Mode is now OFF" in results[0].content and "Excellent" in results[1].content
    assert [m.tool_call_id for m in results] == [call.id for call in env.episode.calls]
    assert env.score().reward == 1.0


def test_what_agent_and_user_do_to_each_other_is_in_sync():
    """The agent's payment request reaches the user's phone, and the user's payment the bill."""
    spec = next(s for s in tasks.load("telecom", "full") if "overdue_bill_suspension[" in s.task_id)
    pay = UserAction(tool_calls=(ToolCall("check_payment_request"), ToolCall("make_payment")))
    env = telecom(pay, UserAction(text="Paid."))
    env.reset(seed=0, options={"task_id": spec.task_id})
    bill = env.episode.world.tools.db.bills[-1]
    env.step(calls("send_payment_request", customer_id=bill.customer_id, bill_id=bill.bill_id))
    env.step(Action(text="Please pay."))
    assert bill.bill_id in env.episode.user.heard[-1][0].content
    assert bill.status.value == "Paid"


@pytest.mark.parametrize(
    ("stop", "reason"),
    [
        (UserStop.STOP, StopReason.USER_STOP),
        (UserStop.TRANSFER, StopReason.TRANSFER),
        (UserStop.OUT_OF_SCOPE, StopReason.OUT_OF_SCOPE),
    ],
)
def test_the_user_ends_the_episode(stop, reason):
    env = telecom(UserAction(text="Bye.", stop=stop))
    observation, reward, terminated, truncated, info = env.step(Action(text="Anything else?"))
    assert observation == (Message("user", "Bye."),) and (terminated, truncated) == (True, False)
    assert info["stop_reason"] is reason and info["outcome"] is Outcome.FAILED
    assert reward == 0.0 and info["reward_parts"] == {"ENV_ASSERTION": 0.0}
    with pytest.raises(ResetNeeded, match=reason):
        env.step(Action(text="Hello?"))


def test_a_user_that_stops_wordlessly_leaves_an_empty_observation():
    observation, _, terminated, *_ = telecom(UserAction(stop=UserStop.STOP)).step(Action(text="Bye."))
    assert observation == () and terminated


def test_a_transfer_is_a_tool_and_the_user_ends_the_episode_on_hearing_of_it():
    env = telecom(UserAction(stop=UserStop.TRANSFER))
    observation, _, terminated, truncated, _ = env.step(calls("transfer_to_human_agents", summary="no fix"))
    assert observation[0].content == "Transfer successful" and not terminated and not truncated
    assert env.step(Action(text="You are being transferred."))[4]["stop_reason"] is StopReason.TRANSFER


@pytest.mark.parametrize(
    ("user_action", "words"),
    [
        (ConnectionError("no server"), "ConnectionError: no server"),
        (UserAction(), "neither spoke nor acted"),
        (UserAction(tool_calls=(ToolCall("run_speed_test"),)), f"{MAX_USER_ROUNDS} times"),
    ],
)
def test_a_user_that_breaks_is_a_fault_and_not_a_failure(user_action, words):
    env = telecom(user_action)
    with pytest.raises(EnvironmentFault, match=words):
        env.step(Action(text="Hello."))
    assert env.episode.stop_reason is StopReason.FAULT
    with pytest.raises(ResetNeeded):
        env.step(Action(text="Hello."))
    env.reset(seed=0)
    assert env.episode.stop_reason is None


def test_a_user_that_stops_before_the_agent_spoke_is_a_fault():
    class Hasty(Script):
        def reset(self, task, seed):
            return UserAction(stop=UserStop.STOP)

    env = Tau2Env("telecom", user=Hasty([]))
    with pytest.raises(EnvironmentFault, match="before the agent's first turn"):
        env.reset(seed=0)
    with pytest.raises(ResetNeeded):
        env.step(Action(text="Hello."))


def test_a_tool_that_breaks_outside_its_own_error_handling_is_a_fault():
    env = telecom()
    env.episode.world.tools.get_available_plan_ids = None
    env.episode.world.tools.get_details_by_id = lambda id: object()
    with pytest.raises(EnvironmentFault, match="get_details_by_id"):
        env.step(calls("get_details_by_id", id="L1002"))


def test_the_turn_limit_truncates_and_still_tells_the_parts():
    env = telecom(max_turns=2)
    assert not any(env.step(Action(text="Hm."))[2:4])
    _, reward, terminated, truncated, info = env.step(Action(text="Hm."))
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert info["stop_reason"] is StopReason.MAX_TURNS and info["outcome"] is Outcome.TRUNCATED
    assert info["reward_parts"] == {"ENV_ASSERTION": 0.0}


def test_a_solved_state_at_the_turn_limit_is_not_paid():
    act = UserAction(tool_calls=(ToolCall("toggle_data_saver_mode"),))
    env = telecom(act, UserAction(text="Done."), max_turns=1)
    _, reward, _, truncated, info = env.step(Action(text="Please turn off Data Saver."))
    assert truncated and reward == 0.0 and info["reward_parts"] == {"ENV_ASSERTION": 1.0}


@pytest.mark.parametrize("solo_mode", [True, False])
def test_a_stop_wins_over_both_limits(solo_mode):
    if solo_mode:
        env = solo(max_turns=1, max_errors=1)
        action = calls("no_such_tool", "done")
    else:
        call = ToolCall("toggle_data_saver_mode")
        env = telecom(UserAction(tool_calls=(call,), text="Bye.", stop=UserStop.STOP), max_turns=1)
        action = Action(text="Please turn off Data Saver.")
    _, reward, terminated, truncated, info = env.step(action)
    assert (terminated, truncated) == (True, False) and info["stop_reason"].terminated
    assert reward == (0.0 if solo_mode else 1.0)


def test_too_many_errors_truncate():
    env = telecom(max_errors=3)
    for action in (Action(error="bad JSON"), calls("no_such_tool")):
        assert not any(env.step(action)[2:4])
    _, reward, terminated, truncated, info = env.step(calls("get_details_by_id", id="X"))
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert info["stop_reason"] is StopReason.TOO_MANY_ERRORS and info["errors"] == 3


def test_a_fork_goes_its_own_way():
    act = UserAction(tool_calls=(ToolCall("toggle_data_saver_mode"),))
    env = telecom(UserAction(text="Okay."), act, UserAction(text="Done."))
    env.step(Action(text="Hello."))
    fork = env.fork()
    fork.step(Action(text="Please turn off Data Saver."))
    assert fork.score().reward == 1.0 and env.score().reward == 0.0
    assert env.episode.counts["turns"] == 1 and len(env.episode.user.heard) == 1
    assert fork.np_random is not env.np_random


def test_a_live_environment_survives_a_pickle():
    env = Tau2Env("retail", split="base", solo=True)
    env.reset(seed=3)
    user_id = next(iter(env.episode.world.tools.db.users))
    env.step(calls("get_user_details", user_id=user_id))
    stored = pickle.dumps(env)
    assert len(stored) < 500_000
    assert pickle.loads(stored).step(calls("get_user_details", user_id=user_id)) == env.step(
        calls("get_user_details", user_id=user_id)
    )


def test_closing_frees_the_episode():
    env = telecom()
    env.close()
    env.close()
    with pytest.raises(ResetNeeded):
        env.step(Action(text="Hello."))
    assert env.reset(seed=0)[0]


def test_the_default_turn_limit_is_that_of_recipes():
    assert Tau2Env().max_turns == EnvConfig().max_turns == 30
