// Package platforms tests the chart's values files for platforms.
//
// Each directory describes a small cluster of one platform, in the format of `kubectl get KIND -o
// json`. The tests render the chart with the platform's values file. They check the objects with
// Kubernetes' own code: strict decoding, the scheduler's node affinity and tolerations, and the Pod
// Security Standards. The tests need Helm on the PATH or from `e2e/cluster/cluster build`.
package platforms

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
	schedulinghelpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
)

const (
	chart     = "../../charts/cleave"
	namespace = "cleave-system"
)

// strict refuses unknown and repeated fields.
var strict = serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()

// options contains additional options of `helm template` for each platform. They replace facts that
// Helm would read from the API server.
var options = map[string][]string{"openshift": {"--api-versions", "security.openshift.io/v1"}}

// helm returns the path of the Helm program.
func helm(t *testing.T) string {
	t.Helper()
	if found, err := exec.LookPath("helm"); err == nil {
		return found
	}
	cache := os.Getenv("CLEAVE_CACHE")
	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			t.Fatal(err)
		}
		cache = filepath.Join(user, "cleave")
	}
	found, err := filepath.Glob(filepath.Join(cache, "helm-*", "helm"))
	if err != nil || len(found) == 0 {
		t.Fatalf("no helm found: install Helm, or run e2e/cluster/cluster build (%v)", err)
	}
	newest := found[0]
	for _, program := range found {
		if modified(t, program).After(modified(t, newest)) {
			newest = program
		}
	}
	return newest
}

// modified returns the modification time of a file.
func modified(t *testing.T, path string) time.Time {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info.ModTime()
}

// run runs Helm without the user's settings, and returns its output.
func run(t *testing.T, arguments ...string) string {
	t.Helper()
	command := exec.Command(helm(t), arguments...)
	home := t.TempDir()
	command.Env = append(os.Environ(), "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home)
	var stderr bytes.Buffer
	command.Stderr = &stderr
	text, err := command.Output()
	if err != nil {
		t.Fatalf("helm %v: %v\n%s", arguments, err, stderr.String())
	}
	return string(text)
}

// release contains the objects of the rendered chart, without custom resource definitions.
type release []runtime.Object

// render renders the chart for a version of Kubernetes.
func render(t *testing.T, version string, arguments ...string) release {
	t.Helper()
	text := run(t, append([]string{"template", "cleave", chart, "--namespace", namespace, "--kube-version", version}, arguments...)...)
	var objects release
	reader := yaml.NewYAMLReader(bufio.NewReader(strings.NewReader(text)))
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return objects
		}
		if err != nil {
			t.Fatal(err)
		}
		var meta metav1.TypeMeta
		if err := yaml.Unmarshal(document, &meta); err != nil {
			t.Fatalf("%v in:\n%s", err, document)
		}
		if meta.Kind == "" || meta.Kind == "CustomResourceDefinition" {
			continue
		}
		object, _, err := strict.Decode(document, nil, nil)
		if err != nil {
			t.Fatalf("the API refuses this object: %v\n%s", err, document)
		}
		objects = append(objects, object)
	}
}

// all returns the objects of a type.
func all[T runtime.Object](objects release) []T {
	var found []T
	for _, object := range objects {
		if object, ok := object.(T); ok {
			found = append(found, object)
		}
	}
	return found
}

// read returns the items of a list in a platform's description.
func read[T any](t *testing.T, platform, kind string) []T {
	t.Helper()
	var list struct{ Items []json.RawMessage }
	text, err := os.ReadFile(filepath.Join(platform, kind+".json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &list); err != nil {
		t.Fatal(err)
	}
	var items []T
	for _, item := range list.Items {
		if _, _, err := strict.Decode(item, nil, nil); err != nil {
			t.Fatalf("%s/%s.json: %v", platform, kind, err)
		}
		var typed T
		if err := json.Unmarshal(item, &typed); err != nil {
			t.Fatal(err)
		}
		items = append(items, typed)
	}
	return items
}

// serverVersion returns the version of a platform's API server.
func serverVersion(t *testing.T, platform string) string {
	t.Helper()
	var version struct {
		ServerVersion struct{ GitVersion string }
	}
	text, err := os.ReadFile(filepath.Join(platform, "version.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &version); err != nil {
		t.Fatal(err)
	}
	return version.ServerVersion.GitVersion
}

// platforms returns the names of all platforms for which the chart has a values file.
func platforms(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(chart, "platforms", "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, file := range files {
		names = append(names, strings.TrimSuffix(filepath.Base(file), ".yaml"))
	}
	return names
}

func renderPlatform(t *testing.T, platform string) release {
	t.Helper()
	values := filepath.Join(chart, "platforms", platform+".yaml")
	return render(t, serverVersion(t, platform), append([]string{"--values", values}, options[platform]...)...)
}

// forEachPlatform runs a test with each platform's rendered chart.
func forEachPlatform(t *testing.T, test func(t *testing.T, platform string, objects release)) {
	t.Helper()
	for _, platform := range platforms(t) {
		t.Run(platform, func(t *testing.T) { test(t, platform, renderPlatform(t, platform)) })
	}
}

// pods returns the pod templates by the names of their workloads.
func pods(objects release) map[string]corev1.PodTemplateSpec {
	templates := map[string]corev1.PodTemplateSpec{}
	for _, set := range all[*appsv1.DaemonSet](objects) {
		templates[set.Name] = set.Spec.Template
	}
	for _, deployment := range all[*appsv1.Deployment](objects) {
		templates[deployment.Name] = deployment.Spec.Template
	}
	return templates
}

// runsOn reports whether a DaemonSet with this template runs a pod on a node.
func runsOn(t *testing.T, template corev1.PodTemplateSpec, node *corev1.Node) bool {
	t.Helper()
	matches, err := nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: template.Spec}).Match(node)
	if err != nil {
		t.Fatal(err)
	}
	_, untolerated := schedulinghelpers.FindMatchingUntoleratedTaint(klog.Background(), node.Spec.Taints, template.Spec.Tolerations, func(taint *corev1.Taint) bool {
		return taint.Effect != corev1.TaintEffectPreferNoSchedule
	}, false)
	return matches && !untolerated
}

// violations describes the rules of a Pod Security Standard that a pod violates.
func violations(t *testing.T, level api.Level, template corev1.PodTemplateSpec) string {
	t.Helper()
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		t.Fatal(err)
	}
	standard := api.LevelVersion{Level: level, Version: api.LatestVersion()}
	result := policy.AggregateCheckResults(evaluator.EvaluatePod(standard, &template.ObjectMeta, &template.Spec))
	return result.ForbiddenDetail()
}

func TestEachValuesFileHasADescriptionOfItsPlatform(t *testing.T) {
	described, err := filepath.Glob("*/nodes.json")
	if err != nil {
		t.Fatal(err)
	}
	for index, file := range described {
		described[index] = filepath.Dir(file)
	}
	names := platforms(t)
	slices.Sort(names)
	if len(names) == 0 || !slices.Equal(names, described) {
		t.Fatalf("values files of %v, descriptions of %v", names, described)
	}
	for _, platform := range names {
		for kind, readKind := range map[string]func(){
			"daemonsets":      func() { read[appsv1.DaemonSet](t, platform, "daemonsets") },
			"resourcequotas":  func() { read[corev1.ResourceQuota](t, platform, "resourcequotas") },
			"namespaces":      func() { read[corev1.Namespace](t, platform, "namespaces") },
			"priorityclasses": func() { read[metav1.PartialObjectMetadata](t, platform, "priorityclasses") },
		} {
			t.Run(platform+"/"+kind, func(*testing.T) { readKind() })
		}
	}
}

// In the descriptions, exactly the GPU nodes have names that contain `gpu`.
func TestNodePodsRunOnGpuNodesOnly(t *testing.T) {
	forEachPlatform(t, func(t *testing.T, platform string, objects release) {
		sets := all[*appsv1.DaemonSet](objects)
		if len(sets) != 3 {
			t.Fatalf("%d DaemonSets", len(sets))
		}
		gpus, others := 0, 0
		for _, node := range read[corev1.Node](t, platform, "nodes") {
			hasGpu := strings.Contains(node.Name, "gpu")
			if hasGpu {
				gpus++
			} else {
				others++
			}
			for _, set := range sets {
				if runs := runsOn(t, set.Spec.Template, &node); runs != hasGpu {
					t.Errorf("%s runs on %s: %v", set.Name, node.Name, runs)
				}
			}
		}
		if gpus == 0 || others == 0 {
			t.Errorf("%d GPU nodes and %d others", gpus, others)
		}
	})
}

func TestEachLabelOfTheValuesSelectsANode(t *testing.T) {
	checkLabels(t, render(t, "1.36.0"))
	checkLabels(t, renderPlatform(t, "talos"))
}

// checkLabels checks that each label in the DaemonSets' node affinity is sufficient to select a
// node.
func checkLabels(t *testing.T, objects release) {
	t.Helper()
	terms := all[*appsv1.DaemonSet](objects)[0].Spec.Template.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	if len(terms) < 8 {
		t.Fatalf("%d terms", len(terms))
	}
	for _, term := range terms {
		requirement := term.MatchExpressions[0]
		value := "any"
		if len(requirement.Values) > 0 {
			value = requirement.Values[0]
		}
		labels := map[string]string{"kubernetes.io/os": "linux", requirement.Key: value}
		for _, set := range all[*appsv1.DaemonSet](objects) {
			if !runsOn(t, set.Spec.Template, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: labels}}) {
				t.Errorf("%s does not run on nodes with %s=%s", set.Name, requirement.Key, value)
			}
			labels := map[string]string{"kubernetes.io/os": "windows", requirement.Key: value}
			if runsOn(t, set.Spec.Template, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: labels}}) {
				t.Errorf("%s runs on Windows", set.Name)
			}
		}
	}
}

func TestRuntimeClassesExist(t *testing.T) {
	forEachPlatform(t, func(t *testing.T, platform string, objects release) {
		var existing []string
		for _, class := range read[nodev1.RuntimeClass](t, platform, "runtimeclasses") {
			existing = append(existing, class.Name)
		}
		for name, template := range pods(objects) {
			if class := template.Spec.RuntimeClassName; class != nil && !slices.Contains(existing, *class) {
				t.Errorf("%s needs the RuntimeClass %s, but the platform has %v", name, *class, existing)
			}
		}
	})
	for name, template := range pods(render(t, "1.36.0")) {
		if template.Spec.RuntimeClassName != nil {
			t.Errorf("by default %s needs a RuntimeClass", name)
		}
	}
}

// Helm applies the values file of the GPU Operator after the platform's file. The result must not
// contain a driver directory of the platform.
func TestTheGpuOperatorsValuesReplaceEachPlatformsDriver(t *testing.T) {
	const operator = "gpu-operator"
	path := func(platform string) string { return filepath.Join(chart, "platforms", platform+".yaml") }
	expected := pods(renderPlatform(t, operator))
	for _, platform := range platforms(t) {
		t.Run(platform, func(t *testing.T) {
			objects := render(t, "1.36.0", append([]string{"--values", path(platform), "--values", path(operator)}, options[platform]...)...)
			for _, set := range all[*appsv1.DaemonSet](objects) {
				found, wanted := set.Spec.Template.Spec, expected[set.Name].Spec
				// The kubelet relay does not use the driver.
				class, usesDriver := found.RuntimeClassName, set.Name != "cleave-kubelet-relay"
				if usesDriver != (class != nil && *class == "nvidia") {
					t.Errorf("%s has the RuntimeClass %v", set.Name, class)
				}
				if !equality.Semantic.DeepEqual(found.Volumes, wanted.Volumes) {
					t.Errorf("%s has the volumes %v, not %v", set.Name, found.Volumes, wanted.Volumes)
				}
				for index, container := range found.Containers {
					other := wanted.Containers[index]
					if !equality.Semantic.DeepEqual(container.VolumeMounts, other.VolumeMounts) || !equality.Semantic.DeepEqual(container.Args, other.Args) ||
						!equality.Semantic.DeepEqual(container.Env, other.Env) {
						t.Errorf("%s differs: %v %v %v", container.Name, container.VolumeMounts, container.Args, container.Env)
					}
				}
			}
		})
	}
}

// A variable such as LD_LIBRARY_PATH in the chart would replace the image's value.
func TestNoPlatformReplacesVariablesOfImages(t *testing.T) {
	forEachPlatform(t, func(t *testing.T, _ string, objects release) {
		for name, template := range pods(objects) {
			for _, argument := range template.Spec.Containers[0].Args {
				if strings.HasPrefix(argument, "--container-env=") {
					t.Errorf("%s has the argument %s", name, argument)
				}
			}
		}
	})
}

// Without the annotation, AKS changes the webhook's selectors.
func TestAksDoesNotEditTheWebhook(t *testing.T) {
	configurations := all[*admissionv1.MutatingWebhookConfiguration](renderPlatform(t, "aks"))
	if len(configurations) != 1 || configurations[0].Annotations["admissions.enforcer/disabled"] != "true" {
		t.Errorf("%v", configurations)
	}
}

// The operator, which also serves the webhook, satisfies the standard. The other pods need an
// exemption by the namespace's label.
func TestOnlyTheOperatorSatisfiesThePodSecurityStandardRestricted(t *testing.T) {
	check := func(t *testing.T, objects release) {
		for name, template := range pods(objects) {
			restricted, baseline := violations(t, api.LevelRestricted, template), violations(t, api.LevelBaseline, template)
			if isOperator := name == "cleave-operator"; isOperator && restricted != "" {
				t.Errorf("%s: %s", name, restricted)
			} else if !isOperator && baseline == "" {
				t.Errorf("%s needs no exception from the standard baseline", name)
			}
		}
	}
	forEachPlatform(t, func(t *testing.T, _ string, objects release) { check(t, objects) })
	t.Run("webhook", func(t *testing.T) { check(t, render(t, "1.34.0", "--set", "admission.gate=webhook")) })
	t.Run("all features", func(t *testing.T) {
		check(t, render(t, "1.36.0", "--set", "operator.taintUnhealthyNodes=true,operator.taintFragmentedNodes=true,mpsHost.upgrade=WhenIdle"))
	})
}

func TestTheNamespaceAdmitsPrivilegedPodsOnlyIfTheChartOwnsIt(t *testing.T) {
	if found := all[*corev1.Namespace](render(t, "1.36.0")); len(found) > 0 {
		t.Errorf("the chart creates %v", found)
	}
	objects := render(t, "1.36.0", "--set", "namespace.create=true")
	found := all[*corev1.Namespace](objects)
	if len(found) != 1 || found[0].Name != namespace {
		t.Fatalf("the chart creates %v", found)
	}
	standards, errs := api.PolicyToEvaluate(found[0].Labels, api.Policy{})
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	for _, standard := range []api.LevelVersion{standards.Enforce, standards.Audit, standards.Warn} {
		for name, template := range pods(objects) {
			if detail := violations(t, standard.Level, template); standard.Level != api.LevelPrivileged || detail != "" {
				t.Errorf("%s and the standard %s: %s", name, standard.Level, detail)
			}
		}
	}
	if found[0].Annotations["helm.sh/resource-policy"] != "keep" {
		t.Error("an uninstall deletes the namespace and all that is in it")
	}
}

func TestAQuotaAllowsEverySystemPriorityClass(t *testing.T) {
	forEachPlatform(t, func(t *testing.T, _ string, objects release) {
		quotas := all[*corev1.ResourceQuota](objects)
		if len(quotas) != 1 {
			t.Fatalf("%d quotas", len(quotas))
		}
		if pods := quotas[0].Spec.Hard[corev1.ResourcePods]; pods.Value() < 1_000_000 {
			t.Errorf("the quota allows %v pods only", pods.Value())
		}
		scopes := quotas[0].Spec.ScopeSelector.MatchExpressions
		for name, template := range pods(objects) {
			class := template.Spec.PriorityClassName
			if !strings.HasPrefix(class, "system-") || len(scopes) != 1 || scopes[0].ScopeName != corev1.ResourceQuotaScopePriorityClass ||
				!slices.Contains(scopes[0].Values, class) {
				t.Errorf("no quota allows %s of %s: %v", class, name, scopes)
			}
		}
	})
	for _, values := range []string{"priorityClass.quota=false", "nodes.priorityClassName=,operator.priorityClassName=gpus"} {
		if found := all[*corev1.ResourceQuota](render(t, "1.36.0", "--set", values)); len(found) > 0 {
			t.Errorf("%s: the chart creates %v", values, found)
		}
	}
	one := all[*corev1.ResourceQuota](render(t, "1.36.0", "--set", "nodes.priorityClassName=system-cluster-critical"))
	if len(one) != 1 || !slices.Equal(one[0].Spec.ScopeSelector.MatchExpressions[0].Values, []string{"system-cluster-critical"}) {
		t.Errorf("quotas for one class: %v", one)
	}
}

// constraints returns, for each service account, the SecurityContextConstraints that it may use.
func constraints(objects release) map[string]string {
	used := map[string]string{}
	for _, binding := range all[*rbacv1.RoleBinding](objects) {
		name, ok := strings.CutPrefix(binding.RoleRef.Name, "system:openshift:scc:")
		if !ok {
			continue
		}
		for _, subject := range binding.Subjects {
			used[fmt.Sprintf("%s/%s", subject.Namespace, subject.Name)] = name
		}
	}
	return used
}

func TestOpenShiftAdmitsEachPod(t *testing.T) {
	detect := options["openshift"]
	for what, rendered := range map[string]release{
		"platform": renderPlatform(t, "openshift"),
		"detected": render(t, "1.34.0", detect...),
		"enabled":  render(t, "1.34.0", "--set", "openshift.enabled=true"),
	} {
		used := constraints(rendered)
		for name, template := range pods(rendered) {
			account := namespace + "/" + template.Spec.ServiceAccountName
			wanted := "privileged"
			if name == "cleave-operator" {
				wanted = "nonroot-v2"
			}
			if used[account] != wanted {
				t.Errorf("%s: %s may use %q, not %s", what, account, used[account], wanted)
			}
		}
	}
	for what, rendered := range map[string]release{
		"elsewhere": render(t, "1.36.0"),
		"disabled":  render(t, "1.36.0", append([]string{"--set", "openshift.enabled=false"}, detect...)...),
	} {
		if used := constraints(rendered); len(used) > 0 {
			t.Errorf("%s: %v", what, used)
		}
	}
}

func TestSELinuxOptionsApplyToThePodsOfNodesOnly(t *testing.T) {
	for name, template := range pods(renderPlatform(t, "openshift")) {
		context := template.Spec.Containers[0].SecurityContext
		if isSet := context.SELinuxOptions != nil && context.SELinuxOptions.Type == "spc_t"; isSet == (name == "cleave-operator") {
			t.Errorf("%s: %v", name, context.SELinuxOptions)
		}
	}
	for name, template := range pods(render(t, "1.36.0")) {
		// Only the kubelet relay needs SELinux options, because its container is not privileged.
		found := template.Spec.Containers[0].SecurityContext.SELinuxOptions
		if isSet := found != nil && found.Type == "spc_t"; isSet != (name == "cleave-kubelet-relay") {
			t.Errorf("by default %s has %v", name, found)
		}
	}
}

func TestServicesUseBothFamiliesWhereTheClusterHasThem(t *testing.T) {
	services := all[*corev1.Service](render(t, "1.34.0", "--set", "admission.gate=webhook"))
	if len(services) == 0 {
		t.Fatal("no Service")
	}
	for _, service := range services {
		if family := service.Spec.IPFamilyPolicy; family == nil || *family != corev1.IPFamilyPolicyPreferDualStack {
			t.Errorf("%s: %v", service.Name, family)
		}
	}
}
