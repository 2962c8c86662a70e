"""What every test shares: forced host devices, the fixtures, and a skip for too few devices that counts as an error."""

import os

DEVICES = 8

# Before JAX is imported anywhere: the sharding tests need several devices in one process.
_FORCE = "--xla_force_host_platform_device_count"
if _FORCE not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FORCE}={DEVICES}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# The same examples at every run: what fails here fails everywhere.
hypothesis.settings.register_profile("deterministic", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("deterministic")


def pytest_configure(config):
    config.addinivalue_line("markers", "smoke: under two minutes, on the oldest and the newest JAX")
    config.addinivalue_line("markers", "slow: compiles for long; left to make test-all")
    config.addinivalue_line("markers", "xdist_group(name): tests that run in one worker")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A sharding test that skips itself for want of devices would prove nothing, silently."""
    outcome = yield
    report = outcome.get_result()
    reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
    if "device" in reason:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: skipped for want of devices; {_FORCE} must be set before JAX starts"


@pytest.fixture(scope="session", autouse=True)
def enough_devices():
    count = len(jax.devices("cpu"))
    assert count >= DEVICES, f"{count} CPU devices, expected {DEVICES}: JAX was started before tests/conftest.py"


@pytest.fixture
def x64():
    """float64 exists."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=["ffi", "xla"])
def implementation(request):
    return request.param
