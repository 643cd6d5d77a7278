//go:build integ

// Package ambient replaces the setup of Istio's package tests/integration/ambient: the mesh is deployed already, and the
// tests that need a waypoint, a gateway, a sidecar or Prometheus do not run. The other files of Istio's package refer to
// the names that this file declares.
package ambient

import (
	"context"
	"encoding/json"
	"flag"
	"os"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"istio.io/api/label"
	"istio.io/istio/pkg/config/constants"
	"istio.io/istio/pkg/test/framework"
	"istio.io/istio/pkg/test/framework/components/ambient"
	"istio.io/istio/pkg/test/framework/components/echo"
	"istio.io/istio/pkg/test/framework/components/echo/common/deployment"
	"istio.io/istio/pkg/test/framework/components/echo/common/ports"
	echodeployment "istio.io/istio/pkg/test/framework/components/echo/deployment"
	"istio.io/istio/pkg/test/framework/components/echo/match"
	"istio.io/istio/pkg/test/framework/components/istio"
	"istio.io/istio/pkg/test/framework/components/namespace"
	"istio.io/istio/pkg/test/framework/components/prometheus"
	"istio.io/istio/pkg/test/framework/resource"
)

const (
	WorkloadAddressedWaypoint = "workload-addressed-waypoint"
	ServiceAddressedWaypoint  = "service-addressed-waypoint"
	Captured                  = "captured"
	Uncaptured                = "uncaptured"
	Sidecar                   = "sidecar"
)

// EchoDeployments has the fields of Istio's type to which the tests refer.
type EchoDeployments struct {
	Namespace         namespace.Instance
	ExternalNamespace namespace.Instance

	WorkloadAddressedWaypoint echo.Instances
	ServiceAddressedWaypoint  echo.Instances
	Captured                  echo.Instances
	Uncaptured                echo.Instances
	Sidecar                   echo.Instances
	MockExternal              echo.Instances

	All          echo.Instances
	Mesh         echo.Instances
	MeshExternal echo.Instances

	// Always empty: no waypoint runs.
	WaypointProxies map[string]ambient.Waypoints
}

var (
	i    istio.Instance
	apps = &EchoDeployments{}
	// Always nil: only tests of telemetry, which cannot run, use Prometheus.
	prom prometheus.Instance
)

func TestMain(m *testing.M) {
	flag.Parse()
	if flag.Lookup("test.list").Value.String() != "" {
		// The framework's setup needs a cluster, a list of the tests does not.
		os.Exit(m.Run())
	}
	framework.NewSuite(m).
		Setup(func(ctx resource.Context) error {
			// With this setting, the framework adds no container istio-proxy to the apps.
			ctx.Settings().Ambient = true
			return nil
		}).
		Setup(istio.Setup(&i, func(_ resource.Context, config *istio.Config) {
			// Whatever the flags are, the framework must not install istio-cni beside inpod.
			config.DeployIstio = false
		})).
		Setup(deployApps).
		Run()
}

func deployApps(ctx resource.Context) error {
	var err error
	if apps.Namespace, err = namespace.New(ctx, namespace.Config{
		Prefix: "echo",
		Labels: map[string]string{label.IoIstioDataplaneMode.Name: constants.DataplaneModeAmbient},
	}); err != nil {
		return err
	}
	if apps.ExternalNamespace, err = namespace.New(ctx, namespace.Config{
		Prefix: "external",
		// The discovery selectors of Istio's own test mesh leave namespaces with this label out.
		Labels: map[string]string{"istio.io/test-exclude-namespace": "true"},
	}); err != nil {
		return err
	}

	builder := echodeployment.New(ctx).
		WithConfig(appConfig(WorkloadAddressedWaypoint, nil)).
		WithConfig(appConfig(ServiceAddressedWaypoint, nil)).
		WithConfig(appConfig(Captured, nil)).
		WithConfig(appConfig(Uncaptured, map[string]string{label.IoIstioDataplaneMode.Name: constants.DataplaneModeNone}))
	external := deployment.External{Namespace: apps.ExternalNamespace}
	echos, err := external.Build(ctx, builder).Build()
	if err != nil {
		return err
	}
	external.LoadValues(echos)
	apps.MockExternal = external.All

	apps.All = match.Namespace(apps.Namespace).GetMatches(echos)
	apps.WorkloadAddressedWaypoint = appInstances(WorkloadAddressedWaypoint)
	apps.ServiceAddressedWaypoint = appInstances(ServiceAddressedWaypoint)
	apps.Captured = appInstances(Captured)
	apps.Uncaptured = appInstances(Uncaptured)
	// The tests of restarts send requests from an app with a sidecar, too. A captured app takes its place: these tests
	// index the list without a check, so an empty list would make them panic.
	apps.Sidecar = apps.ServiceAddressedWaypoint
	for _, app := range apps.All {
		if app.Config().HasProxyCapabilities() {
			apps.Mesh = append(apps.Mesh, app)
		} else {
			apps.MeshExternal = append(apps.MeshExternal, app)
		}
	}
	return nil
}

// appConfig describes a Service with two Deployments of one pod each: the tests compare versions, and a restart of one
// Deployment leaves the Service an endpoint.
func appConfig(service string, podLabels map[string]string) echo.Config {
	return echo.Config{
		Service:        service,
		Namespace:      apps.Namespace,
		Ports:          ports.All(),
		ServiceAccount: true,
		Subsets: []echo.SubsetConfig{
			{Version: "v1", Replicas: 1, Labels: podLabels},
			{Version: "v2", Replicas: 1, Labels: podLabels},
		},
	}
}

func appInstances(service string) echo.Instances {
	return match.ServiceName(echo.NamespacedName{Name: service, Namespace: apps.Namespace}).GetMatches(apps.All)
}

// SetWaypoint labels a Service with the name of a waypoint, until the test ends; an empty name removes the label.
func SetWaypoint(t framework.TestContext, service string, waypoint string) {
	patchWaypoint := func(waypoint *string) error {
		patch, err := json.Marshal(map[string]any{
			"metadata": map[string]any{"labels": map[string]*string{label.IoIstioUseWaypoint.Name: waypoint}},
		})
		if err != nil {
			return err
		}
		for _, cluster := range t.Clusters() {
			services := cluster.Kube().CoreV1().Services(apps.Namespace.Name())
			if _, err := services.Patch(context.Background(), service, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
				return err
			}
		}
		return nil
	}

	var value *string
	if waypoint != "" {
		value = &waypoint
	}
	if err := patchWaypoint(value); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := patchWaypoint(nil); err != nil {
			t.Errorf("the waypoint of %s was not reset: %v", service, err)
		}
	})
}
