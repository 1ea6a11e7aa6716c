"""Flags over environment over defaults; an impossible value is refused by name."""

import pytest

from skiff_operator.errors import SettingsError
from skiff_operator.settings import from_arguments


def test_flags_win_over_the_environment() -> None:
    environ = {"SKIFF_OPERATOR_WORKERS": "3", "SKIFF_OPERATOR_LOG_LEVEL": "debug", "POD_NAME": "me"}
    settings = from_arguments(["--workers", "4"], environ)
    assert (settings.workers, settings.log_level, settings.identity) == (4, "debug", "me")


def test_lists_and_switches() -> None:
    settings = from_arguments(
        ["--namespaces", "a, b", "--allow-host-path", "--allow-privileged-pods"],
        {"SKIFF_OPERATOR_LEADER_ELECT": "false"},
    )
    assert settings.namespaces == ("a", "b")
    assert settings.allow_host_path and settings.allow_privileged_pods and not settings.leader_elect


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--workers", "many"], {}, "--workers"),
        (["--default-image-pull-secrets", "one,T_o"], {}, "--default-image-pull-secrets: 'T_o'"),
        ([], {"SKIFF_OPERATOR_DEFAULT_IMAGE_PULL_SECRETS": "a" * 254}, "--default-image-pull-secrets"),
        (["--workers", "0"], {}, "--workers"),
        (["--metrics-port", "70000"], {}, "--metrics-port"),
        (["--log-level", "loud"], {}, "--log-level"),
        (["--gpu-resource-name", "gpu"], {}, "--gpu-resource-name"),
        ([], {"SKIFF_OPERATOR_ALLOW_PRIVILEGED_PODS": "yes"}, "SKIFF_OPERATOR_ALLOW_PRIVILEGED_PODS"),
        (["--autoscaling-engines", "HPA,VPA"], {}, "--autoscaling-engines must be among HPA, KEDA"),
        (["--autoscaling-engines", "KEDA"], {}, "needs --prometheus-address"),
        (["--lease-renew-seconds", "20"], {}, "--lease-renew-seconds"),
        ([], {"SKIFF_OPERATOR_ALLOW_HOST_PATH": "perhaps"}, "SKIFF_OPERATOR_ALLOW_HOST_PATH"),
    ],
)
def test_impossible_values_are_refused_by_name(argv: list[str], environ: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        from_arguments(argv, environ)


def test_unknown_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        from_arguments(["--no-such-flag"], {})
    assert "--no-such-flag" in capsys.readouterr().err
