//go:build tools

// Package multus pins the version of Multus whose entrypoint the tests run beside the installer.
package multus

import _ "gopkg.in/k8snetworkplumbingwg/multus-cni.v4/cmd/thin_entrypoint"
