//go:build tools

// Package kuberouter pins the version of kube-router, whose firewall enforces network policies in the tier mesh.
package kuberouter

import _ "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router"
