//! The harness of the cluster tests: a client of the local Kubernetes, its components, and waiting
//! on conditions.
//!
//! Everything is synchronous: a test reads as what a person would do. Objects are JSON, as a user
//! of the API sees them. `e2e/test cluster` brings the cluster up, installs Cleave and sets
//! `KUBECONFIG` and `PATH`.
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Value, json};

/// Where the chart is installed.
pub const SYSTEM: &str = "cleave-system";
/// The label that every object a test makes carries, so that it can be swept away.
pub const LABEL: &str = "cleave-e2e";
/// How long a condition may take on two loaded cores before the test gives up.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// The API server, with the rights of the kubeconfig.
pub struct Cluster {
    runtime: tokio::runtime::Runtime,
    client: kube::Client,
}

/// What the API server said no with.
#[derive(Debug)]
pub struct Refused {
    /// HTTP status.
    pub code: u16,
    /// Its message.
    pub message: String,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

impl std::error::Error for Refused {}

impl Cluster {
    /// Connects as `KUBECONFIG` says.
    pub fn connect() -> Result<Self> {
        ensure!(
            std::env::var_os("KUBECONFIG").is_some(),
            "KUBECONFIG is not set: run the cluster tests by `make test-cluster`"
        );
        let _ = rustls::crypto::ring::default_provider().install_default();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let client = runtime.block_on(kube::Client::try_default())?;
        Ok(Self { runtime, client })
    }

    /// The same API server with a token's rights and no others; asking to be somebody else where
    /// one is named.
    pub fn by_token(token: &str, impersonating: Option<&str>) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut config = runtime.block_on(kube::Config::infer())?;
        // In place of the kubeconfig's certificate, which would count before the token.
        config.auth_info = kube::config::AuthInfo {
            token: Some(token.into()),
            impersonate: impersonating.map(str::to_owned),
            ..kube::config::AuthInfo::default()
        };
        let client = {
            // The client starts a task of its own.
            let _entered = runtime.enter();
            kube::Client::try_from(config)?
        };
        Ok(Self { runtime, client })
    }

    /// A token of a service account; bound to a pod, it is as the kubelet gives it to that pod, and
    /// names its node.
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

    /// Reads what is text, as logs are.
    pub fn read(&self, path: &str) -> Result<String> {
        let request = http::Request::builder().uri(path).body(Vec::new())?;
        Ok(self.runtime.block_on(self.client.request_text(request))?)
    }

    /// Reads an object or a list.
    pub fn get(&self, path: &str) -> Result<Value> {
        self.request("GET", path, "application/json", None)
    }

    /// Reads an object that may not be there.
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

    /// A JSON merge patch.
    pub fn patch(&self, path: &str, change: &Value) -> Result<Value> {
        self.request("PATCH", path, "application/merge-patch+json", Some(change))
    }

    /// Deletes an object; one that is gone already is fine.
    pub fn delete(&self, path: &str, grace_seconds: Option<u32>) -> Result<()> {
        let options = grace_seconds.map_or_else(|| json!({}), |seconds| json!({"gracePeriodSeconds": seconds}));
        match self.request("DELETE", path, "application/json", Some(&options)) {
            Ok(_) => Ok(()),
            Err(error) if error.downcast_ref::<Refused>().is_some_and(|refused| refused.code == 404) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// A list's items.
    pub fn list(&self, path: &str) -> Result<Vec<Value>> {
        Ok(self.get(path)?["items"].as_array().cloned().unwrap_or_default())
    }

    /// The cluster's nodes by name.
    pub fn nodes(&self) -> Result<Vec<String>> {
        Ok(self.list("/api/v1/nodes")?.iter().map(|node| text(&node["metadata"]["name"])).collect())
    }

    /// How many of a resource the node says can be allocated.
    pub fn allocatable(&self, node: &str, resource: &str) -> Result<u64> {
        let node = self.get(&format!("/api/v1/nodes/{node}"))?;
        Ok(text(&node["status"]["allocatable"][resource]).parse().unwrap_or(0))
    }

    /// A node's `GpuNode`.
    pub fn gpunode(&self, node: &str) -> Result<Value> {
        self.get(&format!("{GPUNODES}/{node}"))
    }
}

/// Path of the `GpuNode`s.
pub const GPUNODES: &str = "/apis/cleave.dev/v1alpha1/gpunodes";
/// Path of the `SharingPolicy`s.
pub const POLICIES: &str = "/apis/cleave.dev/v1alpha1/sharingpolicies";

/// A string field, or nothing.
pub fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Tries until `probe` gives something, or says what it said last.
pub fn wait_for<T>(what: &str, patience: Duration, mut probe: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + patience;
    loop {
        let last = match probe() {
            Ok(Some(value)) => return Ok(value),
            Ok(None) => "not yet".to_owned(),
            Err(error) => format!("{error:#}"),
        };
        if Instant::now() > deadline {
            bail!("{what}: not within {patience:?}; last: {last}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Tries until a condition holds.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> Result<bool>) -> Result<()> {
    wait_for(what, PATIENCE, || Ok(condition()?.then_some(())))
}

/// Waits until `done`, and fails at once when `broken` says that a promise was broken meanwhile.
pub fn hold_until(
    what: &str,
    mut done: impl FnMut() -> Result<bool>,
    mut broken: impl FnMut() -> Result<Option<String>>,
) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(promise) = broken()? {
            bail!("{what}: broken meanwhile: {promise}");
        }
        if done()? {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Runs a program and gives what it printed, or its error output as the error.
pub fn run(program: &str, args: &[&str]) -> Result<String> {
    let output = output(program, args)?;
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

/// Runs a program and gives all of its result.
pub fn output(program: &str, args: &[&str]) -> Result<Output> {
    Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("running {program} {}", args.join(" ")))
}

/// Runs the cluster's launcher.
pub fn launcher(args: &[&str]) -> Result<String> {
    // Of the running cluster: e2e/cluster/cluster first looks whether it is itself up to date.
    run("cluster", args)
}

/// Sends a signal to a process of the cluster's own, `kubelet@node1` or `etcd` say: `STOP`, `CONT`.
pub fn signal_component(component: &str, signal: &str) -> Result<()> {
    let components = launcher(&["status"])?;
    let mut rows = components.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let row = rows.find(|row| row.first() == Some(&component)).with_context(|| format!("there is no {component}"))?;
    let pid = row.get(2).with_context(|| format!("{component} does not run"))?;
    run("kill", &[&format!("-{signal}"), pid]).map(drop)
}

/// Runs a command on a node, in its mount namespace.
pub fn on_node(node: &str, command: &[&str]) -> Result<String> {
    let mut args = vec!["exec-node", node];
    args.extend_from_slice(command);
    launcher(&args)
}

/// The one process of a program of Cleave's on a node.
pub fn process(node: &str, program: &str) -> Result<String> {
    // By its own name alone: the arguments of others name it too, those of this search among them.
    let find = "for p in $(grep -azl \"^$0\\$\" /proc/[0-9]*/cmdline 2>/dev/null); do \
        [ \"$(tr '\\0' '\\n' <$p 2>/dev/null | head -n 1)\" = \"$0\" ] && echo $p; done | cut -d/ -f3";
    let found = on_node(node, &["sh", "-c", find, &format!("/usr/bin/{program}")])?;
    let found: Vec<&str> = found.split_whitespace().collect();
    ensure!(found.len() == 1, "{} processes of {program} were found on {node}", found.len());
    Ok(found[0].to_owned())
}

/// Sends a signal to the one process of a program of Cleave's on a node: `STOP`, `CONT`, `KILL`.
pub fn signal(node: &str, program: &str, signal: &str) -> Result<()> {
    on_node(node, &["kill", &format!("-{signal}"), &process(node, program)?]).map(drop)
}

/// Faults of a node's simulated hardware, which are taken away with the value.
pub struct Faults<'a> {
    node: &'a str,
}

impl<'a> Faults<'a> {
    /// None yet.
    pub fn on(node: &'a str) -> Self {
        Self { node }
    }

    /// `simgpu` with arguments.
    pub fn simgpu(&self, args: &[&str]) -> Result<String> {
        let mut command = vec!["/opt/simgpu/bin/simgpu"];
        command.extend_from_slice(args);
        on_node(self.node, &command)
    }
}

impl Drop for Faults<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.simgpu(&["clear"]) {
            let _ = writeln!(std::io::stderr(), "the injected faults could not be taken away: {error:#}");
        }
    }
}

/// `kubectl` with arguments.
pub fn kubectl(args: &[&str]) -> Result<String> {
    run("kubectl", args)
}

/// `kubectl apply` of a manifest; gives what it printed, refusals as errors.
pub fn apply(manifest: &str) -> Result<String> {
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

/// A namespace of a test's own, and its policies; all of it goes with the value.
pub struct Scope<'a> {
    /// The cluster.
    pub cluster: &'a Cluster,
    /// The namespace's name.
    pub namespace: String,
}

impl<'a> Scope<'a> {
    /// Makes the namespace, having swept away what an earlier, killed run left.
    pub fn new(cluster: &'a Cluster, name: &str) -> Result<Self> {
        let scope = Self { cluster, namespace: format!("e2e-{name}") };
        scope.sweep()?;
        let namespace = format!("/api/v1/namespaces/{}", scope.namespace);
        wait_until("the namespace of an earlier run is gone", || Ok(cluster.find(&namespace)?.is_none()))?;
        cluster
            .create("/api/v1/namespaces", &json!({"metadata": {"name": scope.namespace, "labels": {LABEL: name}}}))?;
        // Pods cannot be made before the service account is there.
        wait_until("the namespace's service account", || {
            Ok(cluster.find(&format!("/api/v1/namespaces/{}/serviceaccounts/default", scope.namespace))?.is_some())
        })?;
        Ok(scope)
    }

    /// Deletes all policies that tests made and the namespace, and waits until all that held a GPU
    /// is gone. The rest of the namespace may take its time.
    fn sweep(&self) -> Result<()> {
        for policy in self.cluster.list(&format!("{POLICIES}?labelSelector={LABEL}"))? {
            self.cluster.delete(&format!("{POLICIES}/{}", text(&policy["metadata"]["name"])), None)?;
        }
        let namespace = format!("/api/v1/namespaces/{}", self.namespace);
        if self.cluster.find(&namespace)?.is_some() {
            // From now on it takes no pod that a controller makes anew, to hold what is another
            // test's.
            self.cluster.delete(&namespace, None)?;
            wait_until("the namespace has no pods", || {
                let pods = self.pods()?;
                for pod in &pods {
                    self.cluster.delete(&self.pod_path(&text(&pod["metadata"]["name"])), Some(0))?;
                }
                Ok(pods.is_empty())
            })?;
        }
        // What a kubelet says of its node is seconds old: the next test would else read what was
        // offered before.
        wait_until("all GPUs are whole again", || {
            for node in self.cluster.nodes()? {
                let gpus = self.cluster.gpunode(&node)?["status"]["gpus"].as_array().map_or(0, Vec::len);
                let whole = self.cluster.allocatable(&node, "nvidia.com/gpu")?;
                ensure!(usize::try_from(whole)? == gpus, "{node} offers {whole} of {gpus}");
            }
            Ok(true)
        })
    }

    /// Applies a `SharingPolicy`.
    pub fn policy(&self, name: &str, spec: &Value) -> Result<Value> {
        let object = json!({
            "apiVersion": "cleave.dev/v1alpha1", "kind": "SharingPolicy",
            "metadata": {"name": name, "labels": {LABEL: "true"}}, "spec": spec,
        });
        self.cluster.create(POLICIES, &object)
    }

    /// The pods of the namespace.
    pub fn pods(&self) -> Result<Vec<Value>> {
        self.cluster.list(&format!("/api/v1/namespaces/{}/pods", self.namespace))
    }

    /// A pod's path.
    pub fn pod_path(&self, name: &str) -> String {
        format!("/api/v1/namespaces/{}/pods/{name}", self.namespace)
    }

    /// Makes a pod with one container `main` of the client's image, which runs a shell script.
    pub fn pod(&self, name: &str, limits: &Value, script: &str) -> Result<Value> {
        self.cluster.create(&format!("/api/v1/namespaces/{}/pods", self.namespace), &pod(name, limits, script))
    }

    /// The same, on a node although others could run it too.
    pub fn pod_on(&self, node: &str, name: &str, limits: &Value, script: &str) -> Result<Value> {
        let mut object = pod(name, limits, script);
        object["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": node});
        self.cluster.create(&format!("/api/v1/namespaces/{}/pods", self.namespace), &object)
    }

    /// Waits until a pod's container runs.
    pub fn running(&self, name: &str) -> Result<Value> {
        let path = self.pod_path(name);
        wait_for(&format!("{name} runs"), PATIENCE, || {
            let pod = self.cluster.get(&path)?;
            let ready = pod["status"]["containerStatuses"][0]["state"]["running"].is_object();
            match text(&pod["status"]["phase"]).as_str() {
                "Failed" => bail!("it failed: {}", pod["status"]),
                _ => Ok(ready.then_some(pod)),
            }
        })
    }

    /// Waits until a pod has ended, and gives its phase and log.
    pub fn finished(&self, name: &str) -> Result<(String, String)> {
        let path = self.pod_path(name);
        let phase = wait_for(&format!("{name} ends"), PATIENCE, || {
            let phase = text(&self.cluster.get(&path)?["status"]["phase"]);
            Ok(matches!(phase.as_str(), "Succeeded" | "Failed").then_some(phase))
        })?;
        Ok((phase, self.log(name)?))
    }

    /// A pod's log so far.
    pub fn log(&self, name: &str) -> Result<String> {
        self.cluster.read(&format!("{}/log?container=main", self.pod_path(name)))
    }

    /// The first JSON line that a pod's client printed.
    pub fn seen(&self, name: &str) -> Result<Value> {
        wait_for(&format!("{name} says what it sees"), PATIENCE, || {
            let log = self.log(name)?;
            Ok(log.lines().find_map(|line| serde_json::from_str::<Value>(line).ok()))
        })
    }

    /// Runs a command in a pod's container; gives its standard output, or its error output as the
    /// error.
    pub fn exec(&self, name: &str, command: &[&str]) -> Result<String> {
        let mut args = vec!["-n", &self.namespace, "exec", name, "--"];
        args.extend_from_slice(command);
        kubectl(&args)
    }

    /// Deletes a pod and waits until it is gone.
    pub fn delete_pod(&self, name: &str, grace_seconds: u32) -> Result<()> {
        let path = self.pod_path(name);
        self.cluster.delete(&path, Some(grace_seconds))?;
        wait_until(&format!("{name} is gone"), || Ok(self.cluster.find(&path)?.is_none()))
    }
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut told = String::new();
            for pod in self.pods().unwrap_or_default() {
                let _ = writeln!(told, "{}: {}", text(&pod["metadata"]["name"]), pod["status"]);
            }
            let _ = writeln!(std::io::stderr(), "pods of {} at the failure:\n{told}", self.namespace);
        }
        if let Err(error) = self.sweep() {
            let _ = writeln!(std::io::stderr(), "{} could not be swept away: {error:#}", self.namespace);
        }
    }
}

/// A pod with one container `main` of the client's image, which runs a shell script.
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

/// Numbers that look random and are the same each time.
pub struct Random(u64);

impl Random {
    /// From a seed; nothing comes of 0.
    pub fn seeded(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number below a bound.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound.max(1)
    }
}

/// Containers over two GPUs, slices given out twice, and GPUs with more than `units` slices given
/// out, by what a `GpuNode` says of these pods, `namespace/name`. Others are left out: of a pod
/// that was deleted without grace the kubelet gives slices out again while it lists them still.
pub fn given_out_wrongly(node: &Value, staying: &BTreeSet<String>, units: Option<usize>) -> BTreeSet<String> {
    let mut broken = BTreeSet::new();
    let mut containers: BTreeMap<(String, String, String), BTreeSet<String>> = BTreeMap::new();
    for gpu in node["status"]["gpus"].as_array().into_iter().flatten() {
        let mut ids: Vec<String> = Vec::new();
        let held = gpu["allocations"].as_array().into_iter().flatten();
        for held in held.filter(|held| staying.contains(&text(&held["pod"]))) {
            let of = (text(&held["pod"]), text(&held["container"]), text(&held["resource"]));
            containers.entry(of).or_default().insert(text(&held["device"]));
            ids.extend(held["ids"].as_array().into_iter().flatten().map(text));
        }
        let different: BTreeSet<&String> = ids.iter().collect();
        if different.len() != ids.len() || units.is_some_and(|units| ids.len() > units) {
            broken.insert(format!("{}: given out are {}", text(&gpu["uuid"]), gpu["allocations"]));
        }
    }
    for ((pod, container, _), devices) in containers.iter().filter(|(_, devices)| devices.len() > 1) {
        broken.insert(format!("{container} of {pod} is on {devices:?}"));
    }
    broken
}

/// Pods that nobody has deleted, as `namespace/name`.
pub fn staying(pods: &[Value]) -> BTreeSet<String> {
    let stays = |pod: &&Value| pod["metadata"]["deletionTimestamp"].is_null();
    let name = |pod: &Value| format!("{}/{}", text(&pod["metadata"]["namespace"]), text(&pod["metadata"]["name"]));
    pods.iter().filter(stays).map(name).collect()
}
