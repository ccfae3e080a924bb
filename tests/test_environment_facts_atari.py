"""What ppo_atari.py relies on in ALE's vector environment, so that an upgrade that changes it fails here first."""

import gymnasium as gym
import numpy as np
import pytest

ale_py = pytest.importorskip("ale_py")
AtariVectorEnv = pytest.importorskip("ale_py.vector_env").AtariVectorEnv

# Seeding an emulator loads its cartridge anew, which takes as long as 200 steps: few resets below.
NOOP, FIRE = 0, 1


def make(num, game="breakout", **options):
    """As the script makes its games in its default protocol."""
    options = {"life_loss_info": True, "reward_clipping": False} | options
    return AtariVectorEnv(game, num, **options)


def act(envs, action):
    return envs.step(np.full(envs.num_envs, action))


def play(envs, seeds, actions):
    """Observations (T + 1, N, ...) of games played from their seeds."""
    obs, _ = envs.reset(seed=np.array(seeds))
    return np.stack([obs, *(act(envs, action)[0] for action in actions)])


@pytest.mark.parametrize("env_id", ["ALE/MsPacman-v5", "MsPacmanNoFrameskip-v4"])
def test_an_id_names_its_game(env_id):
    """The script reads the game from the id's specification, where no other environment has one."""
    assert gym.spec(env_id).kwargs["game"] == "ms_pacman"
    assert ale_py.roms.get_rom_path("ms_pacman").is_file()
    assert "game" not in gym.spec("CartPole-v1").kwargs


@pytest.mark.parametrize(
    "game, names",
    [
        ("breakout", "NOOP FIRE RIGHT LEFT"),
        ("pong", "NOOP FIRE RIGHT LEFT RIGHTFIRE LEFTFIRE"),
        ("freeway", "NOOP UP DOWN"),
    ],
)
def test_actions_are_the_minimal_set(game, names):
    """An action is an index into the emulator's minimal set; FIRE is one of them or the game has none."""
    ale, envs = ale_py.ALEInterface(), make(1, game)
    ale.loadROM(ale_py.roms.get_rom_path(game))
    assert [action.name for action in ale.getMinimalActionSet()] == names.split()
    assert list(envs.ale.get_action_set()) == ale.getMinimalActionSet()
    assert isinstance(envs.single_action_space, gym.spaces.Discrete) and envs.single_action_space.start == 0
    assert envs.single_action_space.n == len(names.split())


def test_a_lost_life_terminates_but_the_game_goes_on():
    """life_loss_info reports a lost life as termination, with the lives left in `info`, and resets nothing: the
    next step is the next four frames of the same game. The last life is the game's end, at 0 lives."""
    envs, lives = make(1), []
    obs, info = envs.reset(seed=3)
    assert info["lives"].tolist() == [5] and info["lives"].dtype == np.int32
    for _ in range(400):  # FIRE serves the ball; nobody plays it back
        frame, old = info["episode_frame_number"][0], obs
        obs, reward, terminated, truncated, info = act(envs, FIRE)
        assert not truncated and np.array_equal(obs[0, :3], old[0, 1:])
        if info["lives"][0] > 0:  # the game's end can come within the four frames
            assert info["episode_frame_number"][0] == frame + 4
        if terminated:
            lives.append(int(info["lives"][0]))
        if lives and lives[-1] == 0:
            break
    assert lives == [4, 3, 2, 1, 0]


def test_without_life_loss_only_the_last_life_terminates():
    """The protocol of Machado et al. sees one episode a game."""
    envs = make(1, life_loss_info=False)
    envs.reset(seed=3)
    for _ in range(400):
        _, _, terminated, _, info = act(envs, FIRE)
        assert terminated[0] == (info["lives"][0] == 0)
        if terminated:
            return
    pytest.fail("the game did not end")


def test_an_ended_game_can_be_reset_before_the_next_step():
    """ALE would spend the step after an end on a reset that ignores the action. A reset by mask comes before it:
    the next step is then a real one, and the games out of the mask do not notice."""
    envs, alone = make(2, max_num_frames_per_episode=40), make(1)
    assert envs.autoreset_mode == gym.vector.AutoresetMode.NEXT_STEP
    _, info = envs.reset(seed=np.array([3, 4]))
    for _ in range(4):
        act(envs, FIRE)
    mask = np.array([False, True])
    envs.reset(seed=np.array([9]), options={"reset_mask": mask})  # game 1 is now six steps behind game 0
    for _ in range(6):
        obs, _, terminated, truncated, info = act(envs, FIRE)
    assert truncated.tolist() == [True, False] and not terminated.any()
    new, new_info = envs.reset(seed=np.array([5]), options={"reset_mask": ~mask})
    assert np.array_equal(new, np.stack([alone.reset(seed=5)[0][0], obs[1]]))
    assert new_info["episode_frame_number"][1] == info["episode_frame_number"][1]
    after, _, terminated, truncated, after_info = act(envs, FIRE)
    assert np.array_equal(after[0], act(alone, FIRE)[0][0])
    assert not terminated.any() and not truncated.any()
    assert (after_info["episode_frame_number"] == new_info["episode_frame_number"] + 4).all()
    assert np.array_equal(after[:, :3], new[:, 1:])


@pytest.mark.parametrize("sticky", [0.0, 0.25])
def test_a_game_repeats_from_its_seed_and_actions(sticky):
    """Resuming plays the games again: the same seed and actions give the same frames to the bit, in any emulator
    whatever it played before, beside any other game, on any number of threads."""
    actions = np.random.default_rng(0).integers(4, size=40)
    options = {"repeat_action_probability": sticky}
    first = play(make(2, num_threads=1, **options), [11, 12], actions)
    envs = make(2, num_threads=2, **options)
    play(envs, [12, 1], actions[::-1])
    assert np.array_equal(play(envs, [5, 11], actions)[:, 1], first[:, 0])
    assert not np.array_equal(first[:, 0], first[:, 1])


def test_seeds_decide_the_no_ops_of_the_start():
    """Without sticky actions the no-ops at the start are all that differs between games of one sequence of actions."""
    envs = make(5)
    _, info = envs.reset(seed=np.arange(5))
    frames = info["episode_frame_number"]
    assert len(set(frames.tolist())) >= 3 and (frames >= 1).all() and (frames <= 30).all()
    games = np.stack([act(envs, NOOP)[0] for _ in range(20)], 1)  # (N, T, ...)
    assert len({game.tobytes() for game in games}) >= 3


def test_no_no_ops_and_no_fire_start_at_the_first_frame():
    """noop_max=0 and no FIRE play nothing before the agent does (B58: envpool played a no-op all the same)."""
    envs = make(4, noop_max=0, use_fire_reset=False, life_loss_info=False)
    obs, info = envs.reset(seed=np.arange(4))
    assert info["episode_frame_number"].tolist() == [0] * 4
    assert (obs == obs[0]).all()


@pytest.mark.parametrize("frames, steps", [(40, 10), (41, 11)])
def test_the_frame_limit_truncates(frames, steps):
    """The limit counts frames of the agent's own steps, ends by truncation alone and shows the state reached."""
    envs = make(2, max_num_frames_per_episode=frames)
    obs, _ = envs.reset(seed=np.array([1, 2]))
    for step in range(1, steps + 1):
        old, (obs, _, terminated, truncated, _) = obs, act(envs, NOOP)
        assert truncated.tolist() == [step == steps] * 2 and not terminated.any()
    assert np.array_equal(obs[:, :3], old[:, 1:])


def test_rewards_are_raw_integers():
    """reward_clipping=False gives the game's own points, so scores can be reported, and learning takes the sign."""
    envs, points = make(1, "space_invaders"), set()
    envs.reset(seed=1)
    for _ in range(150):
        reward = act(envs, FIRE)[1]
        assert reward.dtype == np.int32
        points.add(int(reward[0]))
    assert max(points) >= 5 and 0 in points


def test_a_new_games_stack_holds_one_frame():
    """Three of the four frames are black at the start [D4], and later the oldest is first; uint8 from the start."""
    envs = make(2)
    obs, _ = envs.reset(seed=np.array([1, 2]))
    assert obs.shape == (2, 4, 84, 84) and obs.dtype == np.uint8
    assert not obs[:, :3].any() and obs[:, 3].any(axis=(1, 2)).all()
    assert np.array_equal(act(envs, NOOP)[0][:, 2], obs[:, 3])


def test_observations_are_new_arrays():
    """The script keeps observations over the next step and reset: neither may write into them."""
    envs = make(1)
    first, _ = envs.reset(seed=1)
    second = act(envs, FIRE)[0]
    kept = first.copy(), second.copy()
    act(envs, FIRE)
    envs.reset(options={"reset_mask": np.ones(1, bool)})
    assert np.array_equal(first, kept[0]) and np.array_equal(second, kept[1])


@pytest.mark.parametrize("game, maxpool", [("breakout", True), ("pong", False), ("seaquest", False)])
def test_the_colour_camera_shows_the_same_game(game, maxpool):
    """The film is taken by a second emulator with the same seed and actions: its picture in grey, shrunk by area, is
    the frame that the agent saw, within one grey level. (The larger of two frames is taken in each colour, so where
    things of several colours move the grey differs more.)"""
    cv2 = pytest.importorskip("cv2")
    actions = np.random.default_rng(1).integers(3, size=80)
    seen = play(make(2, game, maxpool=maxpool), [8, 7], actions)[:, 1, 3]
    colour = {"img_height": 210, "img_width": 160, "grayscale": False, "stack_num": 1, "maxpool": maxpool}
    film = play(make(1, game, **colour), [7], actions)[:, 0, 0]
    assert film.shape == (81, 210, 160, 3) and film.dtype == np.uint8
    assert (film.max(-1) != film.min(-1)).any()
    grey = [
        cv2.resize(cv2.cvtColor(x, cv2.COLOR_RGB2GRAY), (84, 84), interpolation=cv2.INTER_AREA) for x in film
    ]
    assert np.abs(np.stack(grey).astype(int) - seen).max() <= 1
    assert np.abs(np.diff(seen.astype(int), axis=0)).max() > 10  # something moves


def test_the_shared_metadata_is_not_what_counts():
    """Games for training and for evaluation live side by side: one does not change the other's resets."""
    envs = make(1, max_num_frames_per_episode=4)
    make(1, autoreset_mode="SameStep")
    envs.reset(seed=1)
    assert act(envs, FIRE)[3].tolist() == [True]
    assert act(envs, FIRE)[4]["episode_frame_number"][0] < 40 and envs.autoreset_mode.value == "NextStep"
