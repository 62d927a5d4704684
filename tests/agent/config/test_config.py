import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kagent.config.settings import Config, load_config, load_config_of
from kagent.config.values import ModelTable, parse_model_flag, parse_seconds
from kagent.llm.model_config import OPENAI_URL, Prices
from kagent_sandbox.errors import UserError

KEY = "sk-planted-0123456789abcdef"
LOCAL = "http://127.0.0.1:8000/v1"


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def toml(text):
    Path("kagent.toml").write_text(text)


def test_precedence(monkeypatch):
    assert load_config().budget == 50
    Path("pyproject.toml").write_text(
        "[tool.kagent]\nbudget = 1\nseed = 1\njobs = 1\nlang = 'cpp'\n"
    )
    toml("budget = 2\nseed = 2\njobs = 2\n")
    monkeypatch.setenv("KAGENT_BUDGET", "3")
    monkeypatch.setenv("KAGENT_SEED", "3")
    config = load_config(budget=4, seed=None)
    assert (config.budget, config.seed, config.jobs, config.lang) == (4, 3, 2, "cpp")


def test_an_unknown_option_is_an_error():
    toml("buget = 2\n")
    with pytest.raises(UserError, match=r"^kagent.toml: no option 'buget': there are runs, budget"):
        load_config()
    Path("kagent.toml").unlink()
    Path("pyproject.toml").write_text("[tool.kagent]\nbuget = 2\n")
    with pytest.raises(UserError, match=r"^pyproject.toml: no option 'buget'"):
        load_config()
    Path("pyproject.toml").unlink()
    with pytest.raises(UserError, match=r"^no option 'budgte'"):
        load_config(budgte=1)


def test_a_file_sets_no_device():
    """It may be for several machines, and cuda:3 or a UUID is of one."""
    for file, table in (("pyproject.toml", "[tool.kagent]\n"), ("kagent.toml", "")):
        Path(file).write_text(f"{table}device = 'cpu'\n")
        said = f"{file}: no option 'device': .* of one machine: --device or KAGENT_DEVICE chooses"
        with pytest.raises(UserError, match=said):
            load_config()
        Path(file).unlink()


def test_a_file_joins_no_cluster_of_its_own(monkeypatch):
    """What a cluster answers is unpickled, and so may be any code."""
    toml("on = 'ray://a.example:10001'\n")
    with pytest.raises(
        UserError, match=r"^kagent.toml: would join the cluster at a\.example:10001"
    ):
        load_config()
    assert load_config(on="local").on == "local"
    monkeypatch.setenv("KAGENT_ON", "ray://b.example:10001")
    assert load_config().on == "ray://b.example:10001"
    monkeypatch.delenv("KAGENT_ON")
    monkeypatch.setenv("KAGENT_HOSTS", "a.example")
    assert load_config().on == "ray://a.example:10001"


def test_a_file_does_without_no_isolation(monkeypatch):
    toml("isolation = 'T0'\n")
    with pytest.raises(UserError, match=r"^kagent.toml: option isolation: T0 .* --isolation T0 or"):
        load_config()
    assert load_config(isolation="T0").isolation == "T0"
    monkeypatch.setenv("KAGENT_ISOLATION", "T0")
    assert load_config().isolation == "T0"
    monkeypatch.delenv("KAGENT_ISOLATION")
    toml("isolation = 'T1'\n")
    assert load_config().isolation == "T1"


def test_an_unknown_option_of_a_model_is_an_error():
    toml("[[models]]\nname = 'a'\nwieght = 2\n")
    with pytest.raises(UserError, match=r"no option 'wieght' in models\[0\]: there are name, .*w"):
        load_config()


def test_a_misspelt_variable_is_an_error_and_another_program_is_left_alone(monkeypatch):
    monkeypatch.setenv("KAGENT_NAMESPACE", "default")
    monkeypatch.setenv("KAGENT_URL", "http://x")
    monkeypatch.setenv("KAGENT_JUDGE", "{}")  # of other searches, as docs/other-searches.md has it
    load_config()
    monkeypatch.setenv("KAGENT_BUGET", "2")
    with pytest.raises(UserError, match="no option KAGENT_BUGET: is KAGENT_BUDGET meant"):
        load_config()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("budget", -1),
        ("jobs", 0),
        ("lang", "rust"),
        ("max_time", "soon"),
        ("max_cost", 0),
        ("max_cost", float("inf")),
        ("max_tokens", 0),
        ("stop_at", 0.0),
        ("stop_at", 1.5),
        ("temperature", -1),
        ("reply_tokens", 0),
        ("reply_s", "0s"),
        ("proposer", "gpt"),
    ],
)
def test_a_wrong_value_is_named(option, value):
    with pytest.raises(UserError, match=f"option {option}: .*got {value!r}"):
        load_config(**{option: value})


def test_the_place_of_a_wrong_value_is_named(monkeypatch):
    toml("budget = 'x'\nbase_url = 'ftp://me:secret@host'\n")
    Path("pyproject.toml").write_text("[tool.kagent]\njobs = 0\nbudget = 3\n")
    with pytest.raises(UserError, match=r"^kagent\.toml: option budget: .*, got 'x'"):
        load_config()
    with pytest.raises(UserError, match=r"^option budget: .*, got 'y'"):
        load_config(budget="y")
    monkeypatch.setenv("KAGENT_BUDGET", "abc")
    with pytest.raises(UserError, match=r"^KAGENT_BUDGET: option budget: .*, got 'abc'"):
        load_config()
    monkeypatch.setenv("KAGENT_BUDGET", "1")
    with pytest.raises(UserError, match=r"^kagent\.toml: option base_url: expected") as refused:
        load_config()
    assert "secret" not in str(refused.value)
    monkeypatch.setenv("OPENAI_BASE_URL", "ftp://host")
    with pytest.raises(UserError, match=r"^OPENAI_BASE_URL: option base_url: expected"):
        load_config()
    monkeypatch.setenv("KAGENT_BASE_URL", LOCAL)
    with pytest.raises(UserError, match=r"^pyproject\.toml: option jobs: "):
        load_config()
    with pytest.raises(UserError, match=r"^KAGENT_MODELS: no option 'x' in models\[0\]"):
        load_with(monkeypatch, KAGENT_JOBS="1", KAGENT_MODELS='[{"name": "a", "x": 1}]')


def load_with(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return load_config()


def test_a_file_that_is_no_toml_is_named():
    Path("pyproject.toml").write_text("[tool.kagent\n")
    with pytest.raises(UserError, match=r"^pyproject.toml: "):
        load_config()
    toml("budget = = 2\n")
    with pytest.raises(UserError, match=r"^kagent.toml: "):
        load_config()


def test_a_folder_is_no_file_of_settings():
    Path("kagent.toml").mkdir()
    with pytest.raises(UserError, match=r"^kagent.toml: a folder or a device, where a file was"):
        load_config()


@pytest.mark.parametrize("text", ["budget = = 2\n", "models = 3\n", "model = 3\n"])
def test_toml_that_makes_no_sense_is_named(text):
    toml(text)
    with pytest.raises(UserError, match=r"kagent\.toml|option model"):
        load_config()


def test_a_variable_that_is_no_json_is_named(monkeypatch):
    monkeypatch.setenv("KAGENT_MODELS", "{")
    with pytest.raises(UserError) as caught:
        load_config()
    expected = """KAGENT_MODELS: expected JSON, as '[{"name": "MODEL"}]', got '{'"""
    assert str(caught.value).startswith(expected)


def test_every_option_is_described():
    fields = {**Config.model_fields, **ModelTable.model_fields}
    assert all(f.description for f in fields.values())


class TestTime:
    @pytest.mark.parametrize(
        ("text", "seconds"),
        [
            ("90s", 90),
            ("8m", 480),
            ("1h30m", 5400),
            ("1h 30m 5s", 5405),
            ("1.5h", 5400),
            ("2H", 7200),
            ("90", 90),
            ("0.5", 0.5),
            (90, 90),
            (1e2, 100),
        ],
    )
    def test_forms(self, text, seconds):
        assert load_config(max_time=text).max_time == seconds

    @pytest.mark.parametrize(
        "text", ["", "soon", "1h30", "30m1h", "-5", "0", "0s", "inf", "nan", "1e999", "5d", True]
    )
    def test_others_are_refused(self, text):
        with pytest.raises(ValueError, match="expected a time"):
            parse_seconds(text)

    def test_from_every_source(self, monkeypatch):
        toml("max_time = '8m'\nreply_s = '2m'\n")
        assert (load_config().max_time, load_config().reply_s) == (480, 120)
        monkeypatch.setenv("KAGENT_MAX_TIME", "90s")
        assert load_config().max_time == 90

    @given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
    def test_parts_add_up(self, h, m, s):
        if h + m + s:
            assert parse_seconds(f"{h}h{m}m{s}s") == 3600 * h + 60 * m + s

    @given(st.text(max_size=20))
    def test_any_text_is_a_time_or_a_value_error(self, text):
        try:
            seconds = parse_seconds(text)
        except ValueError:
            return
        assert seconds > 0


class TestWhichModels:
    def test_none_is_set(self):
        config = load_config()
        assert (config.model_configs(), config.proposer) == ((), "tune")

    def test_none_is_set_and_one_is_wanted(self):
        with pytest.raises(UserError, match="has no model to ask; set a model: --model NAME, KAG"):
            load_config(proposer="model").model_configs()

    def test_a_model_proposes_unless_something_else_is_said(self):
        assert load_config(model=["a"]).proposer == "model"
        assert load_config(model=["a"], proposer="tune").proposer == "tune"
        assert load_config(proposer="replay:latest").proposer == "replay:latest"
        toml("[[models]]\nname = 'a'\n")
        assert load_config().proposer == "model"

    def test_flags_may_be_repeated_and_weighted(self):
        models = load_config(model=["org/a:free=2", "b"], base_url=LOCAL).model_configs()
        assert [(m.name, m.weight) for m in models] == [("org/a:free", 2.0), ("b", 1.0)]

    @pytest.mark.parametrize("source", ["KAGENT_MODEL", "OPENAI_MODEL", "toml", "toml list"])
    def test_from_every_source(self, source, monkeypatch):
        if source == "toml":
            toml("model = 'a=2, b'")
        elif source == "toml list":
            toml("model = ['a=2', 'b']")
        else:
            monkeypatch.setenv(source, "a=2,b")
        models = load_config(base_url=LOCAL).model_configs()
        assert [(m.name, m.weight) for m in models] == [("a", 2.0), ("b", 1.0)]

    @pytest.mark.parametrize("text", ["", "=2", "a=0", "a=-1", "a=x", "a=", "a=inf", "a=nan"])
    def test_a_flag_that_makes_no_sense(self, text):
        with pytest.raises(UserError, match=r"option model: expected (the name|a weight)"):
            load_config(model=[text])

    @given(st.text(st.characters(exclude_characters="=,"), min_size=1), st.floats(0.001, 1e6))
    def test_a_flag_is_a_name_and_a_weight(self, name, weight):
        if name.strip():
            assert parse_model_flag(f"{name}={weight!r}") == (name.strip(), weight)
            assert parse_model_flag(name) == (name.strip(), 1.0)

    def test_twice_the_same(self):
        with pytest.raises(UserError, match="a model is set twice"):
            load_config(model=["a", "a=2"], base_url=LOCAL).model_configs()

    TABLES = f"""
        temperature = 0.5
        reply_s = "30s"
        base_url = "{LOCAL}"
        [[models]]
        name = "a"
        weight = 3
        [[models]]
        name = "b"
        base_url = "https://far.example/v1/"
        api_key_env = "FAR_KEY"
        temperature = 0
        reply_tokens = 99
        input_price = 1.5
        output_price = 6
    """

    def test_tables(self, monkeypatch):
        toml(self.TABLES)
        monkeypatch.setenv("FAR_KEY", KEY)
        monkeypatch.setenv("KAGENT_HOSTS", "far.example")
        a, b = load_config().model_configs()
        assert (a.name, a.base_url, a.api_key, a.weight) == ("a", LOCAL, None, 3.0)
        assert (a.temperature, a.reply_tokens, a.reply_s, a.prices) == (0.5, 16_000, 30.0, None)
        assert (b.name, b.base_url, b.weight) == ("b", "https://far.example/v1", 1.0)
        assert b.api_key.get_secret_value() == KEY
        assert (b.temperature, b.reply_tokens, b.prices) == (0.0, 99, Prices(1.5, 6.0))

    def test_a_flag_chooses_among_tables_or_names_another(self, monkeypatch):
        toml(self.TABLES)
        a, other = load_config(model=["a=7", "c"]).model_configs()
        assert (a.name, a.weight) == ("a", 7.0)
        assert (other.name, other.base_url, other.temperature) == ("c", LOCAL, 0.5)

    def test_one_price_alone(self):
        toml("[[models]]\nname = 'a'\ninput_price = 1\n")
        with pytest.raises(UserError, match="input_price and output_price are set together"):
            load_config()


class TestKeysAndAddresses:
    def test_ours_come_before_those_of_other_programs(self, monkeypatch):
        toml("model = 'm'\nbase_url = 'http://127.0.0.1:1/v1'\napi_key = 'from-toml'\n")

        def read():
            [model] = load_config().model_configs()
            return model.base_url, model.api_key.get_secret_value(), model.name

        assert read() == ("http://127.0.0.1:1/v1", "from-toml", "m")
        monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:2/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "from-openai")
        monkeypatch.setenv("OPENAI_MODEL", "other")
        assert read() == ("http://127.0.0.1:2/v1", "from-openai", "other")
        monkeypatch.setenv("KAGENT_BASE_URL", "http://127.0.0.1:3/v1")
        monkeypatch.setenv("KAGENT_API_KEY", "from-kagent")
        monkeypatch.setenv("KAGENT_MODEL", "own")
        assert read() == ("http://127.0.0.1:3/v1", "from-kagent", "own")

    def test_an_empty_variable_is_none(self, monkeypatch):
        for name in ("KAGENT_API_KEY", "OPENAI_BASE_URL", "KAGENT_MODEL", "OPENAI_API_KEY"):
            monkeypatch.setenv(name, "")
        config = load_config()
        assert (config.api_key, config.base_url, config.model) == (None, OPENAI_URL, ())

    def test_a_far_model_needs_a_key(self):
        text = "model m at api.openai.com has no key: set KAGENT_API_KEY or OPENAI_API_KEY"
        with pytest.raises(UserError, match=text):
            load_config(model=["m"]).model_configs()

    def test_a_table_says_which_variable_is_missing(self):
        toml("[[models]]\nname = 'm'\nbase_url = 'https://a.example'\napi_key_env = 'A_KEY'\n")
        with pytest.raises(UserError, match=r"m at a\.example has no key: set the variable A_KEY"):
            load_config().model_configs()

    def test_the_key_of_one_address_is_not_sent_to_another(self, monkeypatch):
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        toml("[[models]]\nname = 'm'\nbase_url = 'https://a.example'\n")
        with pytest.raises(UserError, match="has no key: set api_key_env in its table"):
            load_config().model_configs()
        toml(f"[[models]]\nname = 'm'\nbase_url = '{LOCAL}'\n")
        assert load_config().model_configs()[0].api_key is None

    @pytest.mark.parametrize(
        ("file", "table"), [("kagent.toml", ""), ("pyproject.toml", "tool.kagent")]
    )
    def test_a_file_of_the_folder_sends_no_key_to_its_own_address(self, file, table, monkeypatch):
        """A cloned repository's kagent.toml would send the user's key to whoever wrote it."""
        head = f"[{table}]\n" if table else ""
        Path(file).write_text(f"{head}model = 'm'\nbase_url = 'https://a.example:8443/v1'\n")
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        said = rf"^{file}: would send a key of your variables to a\.example:8443, .* KAGENT_HOSTS="
        with pytest.raises(UserError, match=said):
            load_config().model_configs()
        with pytest.raises(UserError, match=said):
            load_config(model=["gpt-5"]).model_configs()
        for known in ("a.example", "b.example, A.example:8443"):
            monkeypatch.setenv("KAGENT_HOSTS", known)
            [model] = load_config().model_configs()
            assert model.api_key.get_secret_value() == KEY
        for other in ("example", "a.example:1", ""):
            monkeypatch.setenv("KAGENT_HOSTS", other)
            with pytest.raises(UserError, match=said):
                load_config().model_configs()
        [model] = load_config(base_url="https://a.example:8443/v1").model_configs()
        assert model.api_key.get_secret_value() == KEY
        monkeypatch.setenv("KAGENT_BASE_URL", "https://b.example/v1")
        assert load_config().model_configs()[0].host == "b.example"

    def test_a_table_sends_no_variable_to_its_own_address(self, monkeypatch):
        toml("[[models]]\nname = 'm'\nbase_url = 'https://a.example'\napi_key_env = 'AWS_KEY'\n")
        monkeypatch.setenv("AWS_KEY", KEY)
        with pytest.raises(UserError, match=r"^kagent.toml: would send a key .* to a\.example, "):
            load_config().model_configs()

    def test_a_file_may_send_a_key_that_it_holds(self):
        toml(f"model = 'm'\nbase_url = 'https://a.example'\napi_key = '{KEY}'\n")
        assert load_config().model_configs()[0].api_key.get_secret_value() == KEY

    def test_an_address_that_comes_as_a_flag_may_be_of_a_file(self, monkeypatch):
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        asked = {"model": "m", "base_url": "https://a.example"}
        with pytest.raises(UserError, match=r"^night.toml: would send a key .* to a\.example, "):
            load_config_of("night.toml", asked).model_configs()
        assert load_config(**asked).model_configs()[0].host == "a.example"

    def test_a_local_model_needs_none_and_may_have_one(self):
        [without] = load_config(model=["m"], base_url=LOCAL).model_configs()
        [with_key] = load_config(model=["m"], base_url=LOCAL, api_key=KEY).model_configs()
        assert without.api_key is None
        assert with_key.api_key.get_secret_value() == KEY

    def test_the_address_of_the_call_itself_will_do(self):
        for end in ("", "/", "/chat/completions", "/chat/completions/"):
            assert load_config(base_url=LOCAL + end).base_url == LOCAL

    def test_white_space_around_a_key_is_dropped(self, monkeypatch):
        monkeypatch.setenv("KAGENT_API_KEY", f" {KEY}\n")
        assert load_config().api_key.get_secret_value() == KEY

    def test_a_key_is_in_no_text(self, monkeypatch):
        config = load_config(model=["m"], api_key=KEY)
        texts = [repr(config), str(config), repr(config.model_configs()), config.model_dump_json()]
        assert not any("sk-planted" in text for text in texts)

    @pytest.mark.parametrize(
        "settings",
        [
            f"api_key = '{KEY} é'",
            f"api_key = ['{KEY}']",
            f"[api_key]\nvalue = '{KEY}'",
            f"base_url = 'https://user:{KEY}@host/v1'",
            f"base_url = 'https://user:{KEY}'",
            f"base_url = 'https://host/v1?key={KEY}'",
            f"base_url = '{KEY}'",
            f"base_url = ['{KEY}']",
            f"base_url = 'https://[{KEY}'",
            f"[[models]]\nname = 'm'\napi_key = '{KEY}'",
            f"[[models]]\nname = 'm'\nbase_url = '{KEY}'",
            f"api_key = '{KEY}",
        ],
    )
    def test_a_wrong_one_is_not_shown(self, settings):
        toml(settings + "\n")
        with pytest.raises(UserError) as caught:
            load_config()
        assert KEY not in str(caught.value)
        assert caught.value.__context__ is None

    def test_a_wrong_one_in_a_tables_variable_is_not_shown(self, monkeypatch):
        monkeypatch.setenv("A_KEY", f"{KEY} é")
        toml("[[models]]\nname = 'm'\napi_key_env = 'A_KEY'\n")
        with pytest.raises(UserError, match="variable A_KEY: a key is printable ASCII") as caught:
            load_config().model_configs()
        assert KEY not in str(caught.value)

    def test_configuration_does_not_import_the_network(self):
        import subprocess
        import sys

        code = (
            "import sys, kagent.config.settings, kagent.cli\n"
            "print([m for m in ('openai', 'httpx2', 'genai_prices') if m in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        assert json.loads(done.stdout) == []
