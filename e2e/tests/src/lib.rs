//! Provides the harness of the cluster tests: a client of the local cluster's API server, access to
//! the cluster's nodes and components, and functions that wait for conditions.
//!
//! All functions are synchronous, so a test is a sequence of steps that a user could also run
//! manually. Objects are JSON values, as users of the API see them. `e2e/test cluster` starts the
//! cluster, installs Cleave and sets `KUBECONFIG` and `PATH`.
mod versions;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Value, json};

pub use versions::{KubernetesVersion, SKIP_FILE_ENV, report_skipped};

/// Namespace in which the chart is installed.
pub const SYSTEM_NAMESPACE: &str = "cleave-system";
/// Label of the namespaces, policies and quotas that tests create. The cleanup selects policies and
/// quotas by this label, and namespaces by name.
pub const TEST_LABEL: &str = "cleave-e2e";
/// Default timeout of a wait. The timeout is long, because the machine may have only two busy
/// cores.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(90);

/// A client of the API server.
pub struct Cluster {
    runtime: tokio::runtime::Runtime,
    client: kube::Client,
}

/// The API server's refusal of a request.
#[derive(Debug)]
pub struct Refused {
    /// HTTP status code.
    pub code: u16,
    /// Message of the `Status` object in the response.
    pub message: String,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

impl std::error::Error for Refused {}

impl Cluster {
    /// Connects to the cluster with the kubeconfig that `KUBECONFIG` names.
    pub fn connect() -> Result<Self> {
        ensure!(
            std::env::var_os("KUBECONFIG").is_some(),
            "KUBECONFIG is not set: run the cluster tests with `make test-cluster`"
        );
        let _ = rustls::crypto::ring::default_provider().install_default();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let client = runtime.block_on(kube::Client::try_default())?;
        Ok(Self { runtime, client })
    }

    /// Connects to the same API server with a token instead of the kubeconfig's credentials. If
    /// `impersonating` is set, requests impersonate the user with this name.
    pub fn by_token(token: &str, impersonating: Option<&str>) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut config = runtime.block_on(kube::Config::infer())?;
        // Remove the kubeconfig's client certificate, which takes precedence over a token.
        config.auth_info = kube::config::AuthInfo {
            token: Some(token.into()),
            impersonate: impersonating.map(str::to_owned),
            ..kube::config::AuthInfo::default()
        };
        let client = {
            // The client spawns a task, which needs a runtime.
            let _entered = runtime.enter();
            kube::Client::try_from(config)?
        };
        Ok(Self { runtime, client })
    }

    /// Requests a token of a service account. If `pod` is set, the token is bound to the pod and
    /// names the pod's node, like the token that the kubelet mounts into the pod.
    pub fn token(&self, namespace: &str, account: &str, pod: Option<&Value>) -> Result<String> {
        let mut spec = json!({"expirationSeconds": 3600});
        if let Some(pod) = pod {
            spec["boundObjectRef"] = json!({
                "apiVersion": "v1", "kind": "Pod", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"],
            });
        }
        let request = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec});
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token");
        Ok(text(&self.create(&path, &request)?["status"]["token"]))
    }

    fn request(&self, method: &str, path: &str, content: &str, body: Option<&Value>) -> Result<Value> {
        let body = body.map(serde_json::to_vec).transpose()?.unwrap_or_default();
        let request = http::Request::builder().method(method).uri(path).header("content-type", content).body(body)?;
        match self.runtime.block_on(self.client.request::<Value>(request)) {
            Ok(value) => Ok(value),
            Err(kube::Error::Api(status)) => Err(Refused { code: status.code, message: status.message.clone() }.into()),
            Err(error) => Err(anyhow!(error).context(format!("{method} {path}"))),
        }
    }

    /// Reads a text response, such as a log.
    pub fn read(&self, path: &str) -> Result<String> {
        let request = http::Request::builder().uri(path).body(Vec::new())?;
        Ok(self.runtime.block_on(self.client.request_text(request))?)
    }

    /// Reads an object or a list.
    pub fn get(&self, path: &str) -> Result<Value> {
        self.request("GET", path, "application/json", None)
    }

    /// Reads an object. Returns `None` if the object does not exist.
    pub fn find(&self, path: &str) -> Result<Option<Value>> {
        match self.get(path) {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.downcast_ref::<Refused>().is_some_and(|refused| refused.code == 404) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Creates an object in the collection at `path`.
    pub fn create(&self, path: &str, object: &Value) -> Result<Value> {
        self.request("POST", path, "application/json", Some(object))
    }

    /// Applies a JSON merge patch.
    pub fn patch(&self, path: &str, change: &Value) -> Result<Value> {
        self.request("PATCH", path, "application/merge-patch+json", Some(change))
    }

    /// Deletes an object. It is not an error if the object does not exist.
    pub fn delete(&self, path: &str, grace_seconds: Option<u32>) -> Result<()> {
        let options = grace_seconds.map_or_else(|| json!({}), |seconds| json!({"gracePeriodSeconds": seconds}));
        match self.request("DELETE", path, "application/json", Some(&options)) {
            Ok(_) => Ok(()),
            Err(error) if error.downcast_ref::<Refused>().is_some_and(|refused| refused.code == 404) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Reads the items of a list.
    pub fn list(&self, path: &str) -> Result<Vec<Value>> {
        Ok(self.get(path)?["items"].as_array().cloned().unwrap_or_default())
    }

    /// Returns the names of the cluster's nodes.
    pub fn nodes(&self) -> Result<Vec<String>> {
        Ok(self.list("/api/v1/nodes")?.iter().map(|node| text(&node["metadata"]["name"])).collect())
    }

    /// Returns the count of a resource in the node's `status.allocatable`, or 0 if the resource is
    /// absent.
    pub fn allocatable(&self, node: &str, resource: &str) -> Result<u64> {
        let node = self.get(&format!("/api/v1/nodes/{node}"))?;
        Ok(text(&node["status"]["allocatable"][resource]).parse().unwrap_or(0))
    }

    /// Reads the `GpuNode` of a node.
    pub fn gpu_node(&self, node: &str) -> Result<Value> {
        self.get(&format!("{GPU_NODES_PATH}/{node}"))
    }
}

/// Path of the `GpuNode`s.
pub const GPU_NODES_PATH: &str = "/apis/cleave.dev/v1alpha1/gpunodes";
/// Path of the `SharingPolicy`s.
pub const POLICIES_PATH: &str = "/apis/cleave.dev/v1alpha1/sharingpolicies";

/// Returns the value as a string, or "" if the value is not a string.
pub fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Calls `probe` repeatedly until `probe` returns a value. Errors of `probe` do not end the wait.
/// Fails after `patience`, and the error contains the result of the last call.
pub fn wait_for<T>(what: &str, patience: Duration, mut probe: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + patience;
    loop {
        let last = match probe() {
            Ok(Some(value)) => return Ok(value),
            Ok(None) => "not yet".to_owned(),
            Err(error) => format!("{error:#}"),
        };
        if Instant::now() > deadline {
            bail!("timed out after {patience:?} waiting for: {what}; last: {last}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Checks a condition repeatedly until the condition is true, for at most [`WAIT_TIMEOUT`].
pub fn wait_until(what: &str, mut condition: impl FnMut() -> Result<bool>) -> Result<()> {
    wait_for(what, WAIT_TIMEOUT, || Ok(condition()?.then_some(())))
}

/// Waits until `done` returns true. Fails immediately if `violation` returns a violation first.
pub fn wait_without_violation(
    what: &str,
    mut done: impl FnMut() -> Result<bool>,
    mut violation: impl FnMut() -> Result<Option<String>>,
) -> Result<()> {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    loop {
        let mut last = "not yet".to_owned();
        match violation() {
            Ok(Some(violation)) => bail!("violation while waiting for: {what}: {violation}"),
            Ok(None) => {}
            Err(error) => last = format!("{error:#}"),
        }
        match done() {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(error) => last = format!("{error:#}"),
        }
        ensure!(Instant::now() < deadline, "timed out after {WAIT_TIMEOUT:?} waiting for: {what}; last: {last}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Runs a program and returns its standard output. If the program fails, the error contains all
/// output.
pub fn run_program(program: &str, args: &[&str]) -> Result<String> {
    let output = program_output(program, args)?;
    ensure!(
        output.status.success(),
        "{program} {}: {}\n{}{}",
        args.join(" "),
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs a program and returns its exit status and output.
pub fn program_output(program: &str, args: &[&str]) -> Result<Output> {
    Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("running {program} {}", args.join(" ")))
}

/// Runs the launcher of the local cluster.
pub fn run_launcher(args: &[&str]) -> Result<String> {
    // Use the running cluster's launcher, which is in `PATH`. The script e2e/cluster/cluster would
    // first check whether the launcher is up to date.
    run_program("cluster", args)
}

/// Returns the directory of the simulated driver, which the cluster's nodes mount. `cluster_up` in
/// `e2e/lib.sh` writes the directory's path to the file `env`.
pub fn driver_directory() -> Result<String> {
    std::env::var("CLEAVE_E2E_DRIVER").context("CLEAVE_E2E_DRIVER is not set: source target/demo/env")
}

/// Sends a signal, such as `STOP` or `CONT`, to a component of the cluster, such as `kubelet@node1`
/// or `etcd`.
pub fn signal_component(component: &str, signal: &str) -> Result<()> {
    let components = run_launcher(&["status"])?;
    let mut rows = components.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let row = rows
        .find(|row| row.first() == Some(&component))
        .with_context(|| format!("the cluster has no component {component}"))?;
    let pid = row.get(2).with_context(|| format!("{component} is not running"))?;
    run_program("kill", &[&format!("-{signal}"), pid]).map(drop)
}

/// Runs a command on a node, in the node's namespaces.
pub fn on_node(node: &str, command: &[&str]) -> Result<String> {
    let mut args = vec!["exec-node", node];
    args.extend_from_slice(command);
    run_launcher(&args)
}

/// The program that restarts the agent, as an argument of [`find_pid`] and [`signal_program`].
pub const AGENT_SUPERVISOR: &str = "cleave-supervise /usr/bin/cleave-agent";

/// Returns the PID of one of Cleave's programs on a node. `program` may also contain the program's
/// first arguments. Fails unless exactly one such process runs. The processes that the MPS host
/// starts for devices do not count.
pub fn find_pid(node: &str, program: &str) -> Result<String> {
    // Compare only the first arguments, because the later arguments of other processes, including
    // this search, contain the name.
    let find = "for p in $(grep -azl \"^${0%% *}\\$\" /proc/[0-9]*/cmdline 2>/dev/null); do \
        [ \"$(tr '\\0' '\\n' <$p 2>/dev/null | head -n $1 | paste -sd ' ')\" = \"$0\" ] && \
        ! tr '\\0' '\\n' <$p 2>/dev/null | grep -qx -e --device && echo $p; done | cut -d/ -f3";
    let words = program.split(' ').count().to_string();
    let found = on_node(node, &["sh", "-c", find, &format!("/usr/bin/{program}"), &words])?;
    let found: Vec<&str> = found.split_whitespace().collect();
    ensure!(found.len() == 1, "found {} processes of {program} on {node}, expected 1", found.len());
    Ok(found[0].to_owned())
}

/// Waits until exactly one process of one of Cleave's programs runs on a node, and returns its PID.
/// A forked child that has not yet executed another program also counts as a process of the
/// program.
pub fn wait_for_pid(node: &str, program: &str) -> Result<String> {
    wait_for(&format!("one {program} runs on {node}"), WAIT_TIMEOUT, || find_pid(node, program).map(Some))
}

/// Sends a signal, such as `STOP`, `CONT` or `KILL`, to one of Cleave's programs on a node.
pub fn signal_program(node: &str, program: &str, signal: &str) -> Result<()> {
    on_node(node, &["kill", &format!("-{signal}"), &wait_for_pid(node, program)?]).map(drop)
}

/// Injects faults into a node's simulated hardware. Dropping this value clears all injected faults
/// of the node.
pub struct Faults<'a> {
    node: &'a str,
}

impl<'a> Faults<'a> {
    /// Returns a value for this node, without injecting a fault.
    pub fn on_node(node: &'a str) -> Self {
        Self { node }
    }

    /// Runs `simgpu` on the node with these arguments.
    pub fn simgpu(&self, args: &[&str]) -> Result<String> {
        let mut command = vec!["/opt/simgpu/bin/simgpu"];
        command.extend_from_slice(args);
        on_node(self.node, &command)
    }
}

impl Drop for Faults<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.simgpu(&["clear"]) {
            let _ = writeln!(std::io::stderr(), "failed to clear the injected faults: {error:#}");
        }
    }
}

/// Runs `kubectl` with these arguments.
pub fn kubectl(args: &[&str]) -> Result<String> {
    run_program("kubectl", args)
}

/// Runs `kubectl apply` on a manifest and returns the output. Fails if the API server refuses the
/// manifest.
pub fn apply_manifest(manifest: &str) -> Result<String> {
    let mut child = Command::new("kubectl")
        .args(["apply", "-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    child.stdin.take().context("no stdin")?.write_all(manifest.as_bytes())?;
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The namespace and the policies of one test. Dropping this value deletes the namespace, and the
/// policies of all tests.
pub struct Scope<'a> {
    /// The client of the cluster's API server.
    pub cluster: &'a Cluster,
    /// The namespace's name.
    pub namespace: String,
}

impl<'a> Scope<'a> {
    /// Creates the namespace. First deletes objects that may remain from an earlier, killed run.
    pub fn new(cluster: &'a Cluster, name: &str) -> Result<Self> {
        let scope = Self { cluster, namespace: format!("e2e-{name}") };
        scope.delete_test_objects()?;
        let namespace = format!("/api/v1/namespaces/{}", scope.namespace);
        wait_until("the namespace of an earlier run no longer exists", || Ok(cluster.find(&namespace)?.is_none()))?;
        cluster.create(
            "/api/v1/namespaces",
            &json!({"metadata": {"name": scope.namespace, "labels": {TEST_LABEL: name}}}),
        )?;
        // The API server refuses pods until the default service account exists.
        wait_until("the namespace has its default service account", || {
            Ok(cluster.find(&format!("/api/v1/namespaces/{}/serviceaccounts/default", scope.namespace))?.is_some())
        })?;
        Ok(scope)
    }

    /// Deletes this test's namespace, and the policies of all tests. Waits until the namespace has
    /// no pods and the nodes advertise all GPUs as whole GPUs. Other objects of the namespace may
    /// remain longer.
    fn delete_test_objects(&self) -> Result<()> {
        for policy in self.cluster.list(&format!("{POLICIES_PATH}?labelSelector={TEST_LABEL}"))? {
            self.cluster.delete(&format!("{POLICIES_PATH}/{}", text(&policy["metadata"]["name"])), None)?;
        }
        let namespace = format!("/api/v1/namespaces/{}", self.namespace);
        if self.cluster.find(&namespace)?.is_some() {
            // Delete the namespace first, because controllers cannot recreate pods in a terminating
            // namespace. Recreated pods would use GPUs that the next test needs.
            self.cluster.delete(&namespace, None)?;
            wait_until("the namespace has no pods", || {
                let pods = self.pods()?;
                for pod in &pods {
                    self.cluster.delete(&self.pod_path(&text(&pod["metadata"]["name"])), Some(0))?;
                }
                Ok(pods.is_empty())
            })?;
        }
        // The kubelet may update its node's status up to 10 s later. Without this wait, the next
        // test could read the earlier status.
        wait_until("the nodes advertise all GPUs as whole GPUs", || {
            for node in self.cluster.nodes()? {
                let gpus = self.cluster.gpu_node(&node)?["status"]["gpus"].as_array().map_or(0, Vec::len);
                let whole = self.cluster.allocatable(&node, "nvidia.com/gpu")?;
                ensure!(usize::try_from(whole)? == gpus, "{node} advertises {whole} whole GPUs of {gpus}");
            }
            Ok(true)
        })
    }

    /// Creates a `SharingPolicy`.
    pub fn create_policy(&self, name: &str, spec: &Value) -> Result<Value> {
        let object = json!({
            "apiVersion": "cleave.dev/v1alpha1", "kind": "SharingPolicy",
            "metadata": {"name": name, "labels": {TEST_LABEL: "true"}}, "spec": spec,
        });
        self.cluster.create(POLICIES_PATH, &object)
    }

    /// Returns the pods of the namespace.
    pub fn pods(&self) -> Result<Vec<Value>> {
        self.cluster.list(&format!("/api/v1/namespaces/{}/pods", self.namespace))
    }

    /// Returns the API path of a pod.
    pub fn pod_path(&self, name: &str) -> String {
        format!("/api/v1/namespaces/{}/pods/{name}", self.namespace)
    }

    /// Creates the pod that [`pod`] returns for these arguments.
    pub fn create_pod(&self, name: &str, limits: &Value, script: &str) -> Result<Value> {
        self.cluster.create(&format!("/api/v1/namespaces/{}/pods", self.namespace), &pod(name, limits, script))
    }

    /// Creates the pod that [`pod`] returns for these arguments, with a node selector for this
    /// node.
    pub fn create_pod_on_node(&self, node: &str, name: &str, limits: &Value, script: &str) -> Result<Value> {
        let mut object = pod(name, limits, script);
        object["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": node});
        self.cluster.create(&format!("/api/v1/namespaces/{}/pods", self.namespace), &object)
    }

    /// Waits until a pod's container runs, and returns the pod. Fails immediately if the pod has
    /// failed.
    pub fn wait_until_running(&self, name: &str) -> Result<Value> {
        let path = self.pod_path(name);
        let pod = wait_for(&format!("{name} runs"), WAIT_TIMEOUT, || {
            let pod = self.cluster.get(&path)?;
            let is_running = pod["status"]["containerStatuses"][0]["state"]["running"].is_object();
            let has_failed = text(&pod["status"]["phase"]) == "Failed";
            Ok((is_running || has_failed).then_some(pod))
        })?;
        ensure!(text(&pod["status"]["phase"]) != "Failed", "{name} failed: {}", pod["status"]);
        Ok(pod)
    }

    /// Waits until a pod has terminated, and returns its phase and log.
    pub fn wait_until_finished(&self, name: &str) -> Result<(String, String)> {
        let path = self.pod_path(name);
        let phase = wait_for(&format!("{name} has terminated"), WAIT_TIMEOUT, || {
            let phase = text(&self.cluster.get(&path)?["status"]["phase"]);
            Ok(matches!(phase.as_str(), "Succeeded" | "Failed").then_some(phase))
        })?;
        Ok((phase, self.pod_log(name)?))
    }

    /// Reads the current log of a pod.
    pub fn pod_log(&self, name: &str) -> Result<String> {
        self.cluster.read(&format!("{}/log?container=main", self.pod_path(name)))
    }

    /// Waits for the first JSON line in a pod's log. The line describes the GPU that
    /// `cleave-client` sees.
    pub fn client_report(&self, name: &str) -> Result<Value> {
        wait_for(&format!("{name} has a JSON line in its log"), WAIT_TIMEOUT, || {
            let log = self.pod_log(name)?;
            Ok(log.lines().find_map(|line| serde_json::from_str::<Value>(line).ok()))
        })
    }

    /// Runs a command in a pod's container and returns its standard output. If the command fails,
    /// the error contains the output.
    pub fn exec_in_pod(&self, name: &str, command: &[&str]) -> Result<String> {
        let mut args = vec!["-n", &self.namespace, "exec", name, "--"];
        args.extend_from_slice(command);
        kubectl(&args)
    }

    /// Deletes a pod and waits until it no longer exists.
    pub fn delete_pod(&self, name: &str, grace_seconds: u32) -> Result<()> {
        let path = self.pod_path(name);
        self.cluster.delete(&path, Some(grace_seconds))?;
        wait_until(&format!("{name} no longer exists"), || Ok(self.cluster.find(&path)?.is_none()))
    }
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut pods = String::new();
            for pod in self.pods().unwrap_or_default() {
                let _ = writeln!(pods, "{}: {}", text(&pod["metadata"]["name"]), pod["status"]);
            }
            let _ = writeln!(std::io::stderr(), "pods of {} at the failure:\n{pods}", self.namespace);
        }
        if let Err(error) = self.delete_test_objects() {
            let _ = writeln!(std::io::stderr(), "failed to clean up {}: {error:#}", self.namespace);
        }
    }
}

/// Returns a pod whose only container, `main`, runs a shell script in the image of the test client.
pub fn pod(name: &str, limits: &Value, script: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "main", "image": "localhost/cleave-client:dev", "imagePullPolicy": "Never",
                "command": ["sh", "-c", script], "resources": {"limits": limits},
            }],
        },
    })
}

/// A reproducible random number generator (xorshift).
pub struct Random(u64);

impl Random {
    /// Creates a generator with a seed. With the seed 0, all numbers are 0.
    pub fn seeded(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next random number, which is less than `bound`.
    pub fn random_below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound.max(1)
    }
}

/// Finds allocation errors in the status of a `GpuNode`. An error is a container with slices of one
/// resource on several devices (GPUs or MIG devices), a slice allocated twice, or a GPU with more
/// than `units` slices allocated.
///
/// Considers only the allocations of `pods`, which contains `namespace/name` of each pod. After a
/// pod is deleted with grace period 0, the kubelet may reallocate the pod's slices while it still
/// lists them for the deleted pod.
pub fn allocation_errors(node: &Value, pods: &BTreeSet<String>, units: Option<usize>) -> BTreeSet<String> {
    let mut errors = BTreeSet::new();
    let mut containers: BTreeMap<(String, String, String), BTreeSet<String>> = BTreeMap::new();
    for gpu in node["status"]["gpus"].as_array().into_iter().flatten() {
        let mut ids: Vec<String> = Vec::new();
        let allocations = gpu["allocations"].as_array().into_iter().flatten();
        for allocation in allocations.filter(|allocation| pods.contains(&text(&allocation["pod"]))) {
            let container = (text(&allocation["pod"]), text(&allocation["container"]), text(&allocation["resource"]));
            containers.entry(container).or_default().insert(text(&allocation["device"]));
            ids.extend(allocation["ids"].as_array().into_iter().flatten().map(text));
        }
        let distinct: BTreeSet<&String> = ids.iter().collect();
        if distinct.len() != ids.len() || units.is_some_and(|units| ids.len() > units) {
            errors.insert(format!("GPU {} has the allocations {}", text(&gpu["uuid"]), gpu["allocations"]));
        }
    }
    for ((pod, container, _), devices) in containers.iter().filter(|(_, devices)| devices.len() > 1) {
        errors.insert(format!("container {container} of pod {pod} is on several GPUs: {devices:?}"));
    }
    errors
}

/// Returns `namespace/name` of each pod that is not being deleted and whose containers have not
/// ended.
pub fn live_pods(pods: &[Value]) -> BTreeSet<String> {
    let remains = |pod: &&Value| {
        let has_ended = matches!(text(&pod["status"]["phase"]).as_str(), "Failed" | "Succeeded");
        pod["metadata"]["deletionTimestamp"].is_null() && !has_ended
    };
    let name = |pod: &Value| format!("{}/{}", text(&pod["metadata"]["namespace"]), text(&pod["metadata"]["name"]));
    pods.iter().filter(remains).map(name).collect()
}
