//! A pod's containers in starting order.

use integration::{
    Spec,
    kubernetes::{Image, VERSION},
};

use crate::{
    PORT,
    absent::uid,
    cri::{
        NamespaceOption,
        containers::{Capabilities, ContainerSecurity, Number},
    },
    image,
};

/// The user and group of Istio's proxy.
const PROXY: i64 = 1337;

const APPLICATION_USER: i64 = 1000;

const VALIDATION_TIMEOUT: &str = "2s";

pub(super) const VALIDATE: Image = Image::Shipped {
    name: "validate",
    tag: VERSION,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Role {
    /// `istio-validation`: our shipped image.
    Validation,
    /// `istio-proxy`: the harness's stand-in.
    Proxy,
    /// Returns its client's address by HTTP.
    App,
}

impl Role {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Validation => "istio-validation",
            Self::Proxy => "istio-proxy",
            Self::App => "app",
        }
    }

    pub(super) fn image(self) -> String {
        match self {
            Self::Validation => format!("localhost/validate:{VERSION}"),
            Self::Proxy => "inpod.test/sidecar:1".to_owned(),
            Self::App => image::NAME.to_owned(),
        }
    }

    pub(super) fn command(self) -> &'static [&'static str] {
        match self {
            Self::Validation | Self::Proxy => &[],
            Self::App => &["/bin/busybox", "httpd"],
        }
    }

    pub(super) fn args(self) -> &'static [&'static str] {
        match self {
            Self::Validation => &["--timeout", VALIDATION_TIMEOUT, "--ip-family", "auto"],
            Self::Proxy => &["proxy", "sidecar"],
            Self::App => &["-f", "-p", "8080", "-h", "/www"],
        }
    }

    fn user(self) -> i64 {
        match self {
            Self::Validation | Self::Proxy => PROXY,
            Self::App => APPLICATION_USER,
        }
    }

    /// `None` if it ends by itself.
    pub(super) fn listens(self) -> Option<u16> {
        match self {
            Self::Validation => None,
            Self::Proxy => Some(15006),
            Self::App => Some(PORT),
        }
    }

    /// Returns an injector's values for an unprivileged pod (services/lib/inpod-injection/src/templates).
    pub(super) fn security(self) -> ContainerSecurity {
        ContainerSecurity {
            capabilities: Some(Capabilities {
                add: Vec::new(),
                drop: vec!["ALL".to_owned()],
            }),
            privileged: false,
            namespaces: Some(NamespaceOption { network: 0, pid: 1 }),
            run_as_user: Some(Number { value: self.user() }),
            run_as_group: Some(Number { value: self.user() }),
            readonly_rootfs: true,
            no_new_privs: true,
        }
    }
}

/// Containers in the order of their start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// An application without a sidecar.
    Alone,
    /// The proxy is a regular container.
    Plain,
    /// A native sidecar after the validation, as Istio has it.
    Native,
    /// A native sidecar before the validation.
    NativeFirst,
}

impl Shape {
    pub(super) fn order(self) -> &'static [Role] {
        match self {
            Self::Alone => &[Role::App],
            Self::Plain | Self::Native => &[Role::Validation, Role::Proxy, Role::App],
            Self::NativeFirst => &[Role::Proxy, Role::Validation, Role::App],
        }
    }

    /// Returns the pod after injection; its cgroup name can contain the UID.
    pub(crate) fn spec(self, name: &str, number: u8) -> Spec {
        let spec = Spec {
            uid: uid(number),
            ..Spec::new(name)
        };
        let validation = "{name: istio-validation, image: validate, securityContext: {runAsUser: 1337, runAsGroup: 1337, \
                          capabilities: {drop: [ALL]}}}";
        let mut spec = match self {
            Self::Alone => return spec,
            Self::Plain => spec.injected(),
            Self::Native | Self::NativeFirst => spec.injected_natively(),
        };
        let at = usize::from(self == Self::NativeFirst);
        spec.init_containers.insert(at, validation.to_owned());
        spec
    }
}
