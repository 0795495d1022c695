#!/bin/sh
# Install Paceline for this user, with uv, and fetch uv where it is missing.
# It says what it will do before it does it, uses no sudo, and changes no file of a shell.
set -eu

# `scripts/wheel` fills these in for a release.
release=
wheel=
wheel_sha256=
constraints_sha256=

uv_version=0.13.9 # as in locks/setup.txt
python=3.13
bin=$HOME/.local/bin
files=$HOME/.local/share/paceline # of a release: uv looks for the wheel again when it upgrades
work=

usage() {
    cat <<'TEXT'
Usage: sh install.sh [--gateway] [--dry-run] [WHEEL]
       sh install.sh --uninstall [--dry-run]

  --gateway    Without the packages of a worker, which are those of MLX.
  --dry-run    Only say what would be done.
  --uninstall  Remove Paceline; keys, policies and caches stay.
  WHEEL        A file that `make wheel` has built; default: the one beside this script.
TEXT
}

refuse() {
    echo "paceline: $1" >&2
    exit 1
}

find_uv() {
    command -v uv || { [ -x "$bin/uv" ] && echo "$bin/uv"; }
}

checksum() { # FILE
    if command -v sha256sum >/dev/null 2>&1; then sha256sum "$1"; else shasum -a 256 "$1"; fi | cut -d ' ' -f 1
}

download() { # URL FILE
    command -v curl >/dev/null 2>&1 || refuse "curl is missing; install it, then try again."
    curl --proto '=https' --tlsv1.2 -fLsS "$1" -o "$2" || refuse "$1 could not be fetched; see above."
}

check_machine() {
    case "$(uname -s)-$(uname -m)" in
    Darwin-x86_64) [ -z "$extra" ] || refuse "MLX needs a Mac with Apple silicon; this one, or this shell (Rosetta), is Intel. --gateway installs a gateway only." ;;
    Darwin-* | Linux-*) ;;
    *) refuse "Paceline runs on macOS and on Linux." ;;
    esac
}

find_wheel() {
    if [ -z "$given" ] && [ -n "$release" ]; then
        source=$release/$wheel
        return
    fi
    if [ -z "$given" ]; then
        for file in "$(dirname "$0")"/paceline-*.whl; do
            [ -z "$given" ] || refuse "there are several wheels beside this script; name one of them."
            given=$file
        done
        [ -f "$given" ] || refuse "there is no wheel beside this script; run \`make wheel\` in a clone, then \`sh dist/install.sh\`."
    fi
    [ -f "$given" ] || refuse "there is no file $given."
    files=$(cd "$(dirname "$given")" && pwd)
    wheel=$(basename "$given")
    source=$files/$wheel
    [ -f "$files/constraints.txt" ] || refuse "$files/constraints.txt is missing; \`make wheel\` writes it beside the wheel."
}

say_plan() {
    echo "This will"
    find_uv >/dev/null || echo "  - fetch uv $uv_version, an installer of Python programs, from https://astral.sh into $bin"
    echo "  - install $source${extra:+ and the packages of a worker}"
    echo "    into an environment of its own with Python $python, in the versions of its constraints.txt"
    echo "  - link the command paceline into $bin"
    echo "It uses no sudo. \`sh install.sh --uninstall\` removes it."
}

fetch_uv() {
    download "https://astral.sh/uv/$uv_version/install.sh" "$work/uv.sh"
    env UV_INSTALL_DIR="$bin" UV_NO_MODIFY_PATH=1 sh "$work/uv.sh" --quiet ||
        refuse "uv could not be installed; see above."
}

# uv compares no checksum of a file that it is given for a tool.
fetch_release() {
    download "$release/$wheel" "$work/$wheel"
    download "$release/constraints.txt" "$work/constraints.txt"
    [ "$(checksum "$work/$wheel") $(checksum "$work/constraints.txt")" = "$wheel_sha256 $constraints_sha256" ] ||
        refuse "the files at $release are not those of this release."
    mkdir -p "$files"
    rm -f "$files"/paceline-*.whl
    mv "$work/$wheel" "$work/constraints.txt" "$files"
}

install_paceline() {
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    find_uv >/dev/null || fetch_uv
    [ -n "$given" ] || fetch_release
    # A wheel that was built again has the same name.
    env UV_TOOL_BIN_DIR="$bin" "$(find_uv)" tool install --python "$python" --reinstall-package paceline \
        --constraints "$files/constraints.txt" "$files/$wheel$extra" || refuse "uv could not install Paceline; see above."
    echo "Installed $("$bin/paceline" --version)."
    if [ -n "$extra" ]; then echo "Next: paceline up"; else echo "Next: paceline gateway"; fi
}

uninstall() {
    uv=$(find_uv) || refuse "uv is not here, so this script has installed nothing."
    echo "This will remove the command paceline and its environment. uv stays, and so does ${PACELINE_STATE_DIR:-$HOME/.paceline}, which has keys, policies and caches."
    [ -n "$dry" ] || {
        env UV_TOOL_BIN_DIR="$bin" "$uv" tool uninstall paceline
        rm -rf "$files"
    }
}

main() { # all of it is read before any of it runs
    extra='[worker]' dry='' given='' action=install
    for argument; do
        case "$argument" in
        --gateway) extra= ;;
        --dry-run) dry=yes ;;
        --uninstall) action=uninstall ;;
        -h | --help) usage && exit ;;
        -*) usage >&2 && refuse "there is no option $argument." ;;
        *)
            [ -z "$given" ] || refuse "$argument is one argument too many."
            given=$argument
            ;;
        esac
    done
    if [ "$action" = uninstall ]; then
        [ -z "$given" ] || refuse "--uninstall takes no wheel."
        uninstall
    else
        check_machine
        find_wheel
        say_plan
        [ -n "$dry" ] || install_paceline
    fi
}

main "$@"
