"""deploy.config_file: one meaning for flags, variables and files; every mistake is named."""

import os
import re
from dataclasses import fields, replace

import pytest

from core.config import ParallelConfig, WorkerPool
from core.errors import ConfigError
from core.worker import WorkerRole
from deploy.config_file import (
    SETTINGS,
    Settings,
    cluster_config,
    engine_config,
    load_settings,
    parse_bytes,
    parse_endpoints,
    parse_pool,
    share_of_cores,
    state_folder,
    worker_config,
)
from deploy.model_source import ResolvedModel
from deploy.up import describe

MODEL = ResolvedModel(path="/models/m.gguf", served_name="m")


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "cluster.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def load(flags=None, env=None, config=None):
    return load_settings(flags=flags or {}, env=env or {}, config=config)


def test_nothing_said_gives_the_defaults():
    assert load() == Settings()


def test_flags_win_over_variables_over_the_file(write):
    config = write("port: 1\nblock_size: 8\ndecode: 4\n")
    settings = load({"port": "3"}, {"TWOSTROKE_PORT": "2", "TWOSTROKE_BLOCK_SIZE": "16"}, config)
    assert (settings.port, settings.block_size, settings.decode) == (3, 16, WorkerPool(count=4))


def test_the_file_may_be_named_by_a_variable(write):
    assert load(env={"TWOSTROKE_CONFIG": write("decode: 3")}).decode == WorkerPool(count=3)


def test_every_setting_reads_its_own_default_back():
    for field in fields(Settings):
        default = getattr(Settings(), field.name)
        if default not in (None, 0):
            assert SETTINGS[field.name].parse(str(default)) == default, field.name


@pytest.mark.parametrize(
    ("said", "expected"),
    [({}, 64), ({"prefill_step_tokens": "32"}, 32), ({"device": "cuda"}, None)],
)
def test_prompts_that_wait_share_a_step_that_suits_the_device(said, expected):
    model = ResolvedModel(path="m", served_name="m")
    config = engine_config(load(said), model)
    assert config.scheduler.prefill_step_tokens == expected


def test_yaml_values_mean_what_they_look_like(write):
    text = "debug: true\nkv_memory: 512MiB\nmax_model_len: null\ndtype: bfloat16\n# comment\n"
    settings = load(config=write(text))
    assert settings.debug is True
    assert settings.kv_memory == 512 << 20
    assert settings.max_model_len is None
    assert settings.dtype == "bfloat16"


def test_empty_file_is_no_error(write):
    assert load(config=write("")) == Settings()


@pytest.mark.parametrize(
    ("flags", "env", "yaml", "message"),
    [
        ({"port": "x"}, {}, "", "--port: 'x' is not a whole number"),
        ({"port": "65536"}, {}, "", "--port: 65536 is not a port"),
        ({"max_num_seqs": "0"}, {}, "", "--max-num-seqs: must be at least 1"),
        ({"dtype": "int3"}, {}, "", "--dtype: 'int3' is not one of float32, bfloat16"),
        ({"quantization": "int2"}, {}, "", "--quantization: 'int2' is not one of int8, int4"),
        ({"request_timeout": "nan"}, {}, "", "--request-timeout: must be a positive number"),
        ({"request_timeout": "soon"}, {}, "", "--request-timeout: 'soon' is not a number"),
        ({"host": ""}, {}, "", "--host: is empty"),
        ({"device": "gpu"}, {}, "", "--device: 'gpu' is not cpu, cuda or cuda:N"),
        ({"device": "cuda:x"}, {}, "", "--device: 'cuda:x' is not cpu"),
        ({}, {"TWOSTROKE_ADVERTISE_HOST": ""}, "", "TWOSTROKE_ADVERTISE_HOST: is empty"),
        ({}, {"TWOSTROKE_KV_MEMORY": "much"}, "", "TWOSTROKE_KV_MEMORY: 'much' is not a size"),
        ({}, {"TWOSTROKE_PROT": "1"}, "", "TWOSTROKE_PROT: there is no such setting (did you"),
        ({}, {"TWOSTROKE_DEBUG": "maybe"}, "", "TWOSTROKE_DEBUG: 'maybe' is not true or false"),
        ({}, {}, "blocksize: 8", "cluster.yaml: blocksize: there is no such setting (did you"),
        ({}, {}, "zzz: 8", "cluster.yaml: zzz: there is no such setting"),
        ({}, {}, "port: [1]", "cluster.yaml: port: expected one value, found a list"),
        ({}, {}, "- port", "cluster.yaml: expected `key: value` lines, found a list"),
        ({}, {}, "port: {", "cluster.yaml: not readable as YAML"),
        ({}, {}, "!!python/object/apply:os.getpid []", "not readable as YAML"),
    ],
)
def test_each_mistake_is_named_in_one_line(write, flags, env, yaml, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load(flags, env, write(yaml))
    assert "\n" not in str(caught.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load(config=str(tmp_path / "nowhere.yaml"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("1k", 1000),
        ("1 KiB", 1024),
        ("1.5GiB", 3 << 29),
        ("2gb", 2 * 10**9),
        ("3Mi", 3 << 20),
    ],
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "1TiB", "1 2"])
def test_no_sizes(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


def test_quantization_reaches_the_engine_and_the_line_that_up_prints(write):
    plain, int4 = (
        cluster_config(load(config=write(text)), MODEL)
        for text in ("quantization: null", "quantization: int4\ndtype: bfloat16")
    )
    assert (plain.engine.quantization, int4.engine.quantization) == (None, "int4")
    assert "decode workers, float32, threads" in describe(plain)
    assert "decode workers, bfloat16 with int4 weights, threads" in describe(int4)
    worker = worker_config(load({"quantization": "int8"}), MODEL, role=WorkerRole.DECODE)
    assert worker.engine.quantization == "int8"


def test_settings_become_the_cluster_config():
    config = cluster_config(load({"prefill": "2", "decode": "3", "block_size": "32"}), MODEL)
    assert (config.prefill.count, config.decode.count) == (2, 3)
    assert config.engine.model_path == config.router.model_path == "/models/m.gguf"
    assert config.engine.cache.block_size == 32
    assert config.router.served_model_name == "m"
    assert config.transfer.backend == "gloo"
    assert not config.transfer.verify_checksum


def test_colocated_workers_stand_instead_of_the_others():
    config = cluster_config(load({"colocated": "2"}), MODEL)
    assert config.num_workers == {WorkerRole.COLOCATED: 2}
    assert describe(config).startswith("2 colocated workers, float32")
    assert cluster_config(load({"colocated": "0"}), MODEL).num_workers == {
        WorkerRole.PREFILL: 1,
        WorkerRole.DECODE: 1,
    }
    for others, named in (
        ({"decode": "1"}, "colocated and decode do not mix"),
        ({"prefill": "2", "decode": "1"}, "colocated and prefill and decode do not mix"),
    ):
        with pytest.raises(ConfigError, match=named):
            cluster_config(load({"colocated": "1", **others}), MODEL)
    with pytest.raises(ConfigError, match="at least one decode worker"):
        replace(config, prefill=WorkerPool(), colocated=WorkerPool(count=0))


def test_checksums_can_be_asked_for(write):
    asked = load(config=write("verify_checksum: yes"))
    assert cluster_config(asked, MODEL).transfer.verify_checksum
    worker = worker_config(asked, MODEL, role=WorkerRole.DECODE, name="decode-0")
    assert worker.transfer.verify_checksum


def test_workers_share_the_cores_unless_told():
    cores = len(os.sched_getaffinity(0))
    assert share_of_cores(1) == cores
    assert share_of_cores(10 * cores) == 1
    assert cluster_config(load({"threads": "7"}), MODEL).engine.num_threads == 7


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "gloo"), ("cuda", "nccl"), ("cuda:11", "nccl")]
)
def test_cuda_moves_kv_over_nccl(device, backend):
    config = cluster_config(load({"device": device}), MODEL)
    assert (config.engine.device, config.transfer.backend) == (device, backend)


def test_a_worker_by_hand():
    settings = load({"port": "0", "served_model_name": "other", "host": "10.0.0.1"})
    config = worker_config(settings, MODEL, role=WorkerRole.DECODE, name="decode-7")
    assert (config.name, config.role, config.host, config.port) == (
        "decode-7", WorkerRole.DECODE, "10.0.0.1", 0,
    )  # fmt: skip
    assert config.served_model_name == "other"
    assert config.advertise_host == "", "it is dialled where it listens"


def by_hand(**settings):
    return worker_config(load(settings), MODEL, role=WorkerRole.PREFILL, name="prefill-0")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "0:0:0:0:0:0:0:0", "0"])
def test_a_worker_that_listens_everywhere_must_say_who_it_is(host):
    with pytest.raises(ConfigError, match="--advertise-host") as caught:
        by_hand(host=host)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="is no address that others can dial"):
        by_hand(host=host, advertise_host=host)
    config = by_hand(host=host, advertise_host="10.0.0.1")
    assert (config.host, config.advertise_host) == (host.strip("[]"), "10.0.0.1")


def test_kubernetes_tells_a_pod_its_address_by_a_variable():
    env = {"TWOSTROKE_HOST": "::", "TWOSTROKE_ADVERTISE_HOST": "fd00::7"}
    config = worker_config(load(env=env), MODEL, role=WorkerRole.DECODE, name="decode-0")
    assert (config.host, config.advertise_host) == ("::", "fd00::7")


def test_endpoints():
    assert parse_endpoints(["a:1,b:2", "[::1]:3"], "--decode") == ("a:1", "b:2", "[::1]:3")
    for bad in ("a", ":1", "a:b", "a:70000", "::1:3", "fd00::7:5001"):
        with pytest.raises(ConfigError, match=r"--decode: .* is not host:port"):
            parse_endpoints([bad], "--decode")


def test_state_folder_follows_xdg(tmp_path):
    assert state_folder({"XDG_STATE_HOME": str(tmp_path)}) == tmp_path / "twostroke"
    assert state_folder({}).parts[-3:] == (".local", "state", "twostroke")


def test_workers_without_a_name_are_never_called_the_same():
    def name(**settings):
        return worker_config(Settings(**settings), MODEL, role=WorkerRole.DECODE).name

    assert name(host="10.0.0.2", port=5001) == "decode-10.0.0.2:5001"
    assert name(host="fd00::7", port=5001) == "decode-[fd00::7]:5001"
    assert name(port=0) != name(port=0)


def test_the_backend_is_a_setting_like_others(write):
    assert load(config=write("backend: processes")).backend == "processes"
    assert load(env={"TWOSTROKE_BACKEND": "local"}).backend == "local"


@pytest.mark.parametrize(
    ("text", "count", "tp", "pp"),
    [
        ("3", 3, 1, 1),
        ("2xtp4", 2, 4, 1),
        ("2xpp3", 2, 1, 3),
        ("4xtp2pp3", 4, 2, 3),
        ("tp2pp2", 1, 2, 2),
        ("pp2", 1, 1, 2),
        ("12xtp16", 12, 16, 1),
    ],
)
def test_workers_have_a_number_and_a_shape(text, count, tp, pp):
    shape = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    assert parse_pool(text) == WorkerPool(count=count, parallel=shape)


@pytest.mark.parametrize(
    "text", ["", "x", "2x", "xtp2", "2tp2", "2xtp0", "tp", "2xpp2tp2", "2.5", "tp2 pp2", "2xx"]
)
def test_what_is_no_shape_is_told_what_one_looks_like(text):
    with pytest.raises(ValueError, match="such as"):
        parse_pool(text)


def test_experts_may_stay_whole():
    shape = parse_pool("2xtp4ep").parallel
    assert (shape.tensor_parallel_size, shape.expert_parallel) == (4, True)
    assert f"{shape}" == "tp4pp1ep"


def test_each_role_has_its_shape_and_ranks_share_the_cores():
    config = cluster_config(load({"prefill": "2xtp2", "decode": "1xpp3"}), MODEL)
    assert config.engine_of(WorkerRole.PREFILL).parallel.tensor_parallel_size == 2
    assert config.engine_of(WorkerRole.DECODE).parallel.pipeline_parallel_size == 3
    assert config.num_ranks == 7
    assert config.engine.num_threads == share_of_cores(7)


def test_no_colocated_worker_means_the_other_two():
    config = cluster_config(load({"colocated": "0"}), MODEL)
    assert config.num_workers == {WorkerRole.PREFILL: 1, WorkerRole.DECODE: 1}


def test_a_worker_by_hand_is_told_its_shape():
    config = worker_config(load({"parallel": "tp2pp2"}), MODEL, role=WorkerRole.COLOCATED)
    assert config.engine.parallel.world_size == 4
    assert config.engine.num_threads == share_of_cores(4)
