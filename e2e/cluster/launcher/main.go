// Command cluster runs a real Kubernetes on one Linux machine, without Docker and without a
// registry. etcd, the API server, the controller manager and the scheduler run on the machine
// itself. Each node runs containerd, the kubelet and kube-proxy in separate namespaces.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// Commands with which the launcher starts new processes of its own program. All of them except
// exec-node are hidden.
const (
	commandNodeInit = "node-init"
	commandSpawn    = "spawn"
	commandExecNode = "exec-node"
	commandEnforce  = "enforce-policies"
)

func init() {
	// These commands enter namespaces. Namespaces apply per thread, so the commands must run on the
	// main thread.
	for _, arg := range os.Args[1:] {
		switch arg {
		case commandNodeInit, commandSpawn, commandExecNode:
			runtime.LockOSThread()
		}
	}
}

// exitCode is the status with which the program exits after it has already reported an error.
type exitCode int

func (code exitCode) Error() string { return fmt.Sprintf("exit status %d", int(code)) }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := newCommand().ExecuteContext(ctx); err != nil {
		var code exitCode
		if errors.As(err, &code) {
			os.Exit(int(code))
		}
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

func newCommand() *cobra.Command {
	var name, state string
	root := &cobra.Command{
		Use:   "cluster",
		Short: "A real Kubernetes on this machine, for Cleave's demo and tests",
		Long: fmt.Sprintf(`A real Kubernetes on this machine, for Cleave's demo and tests.

%s=VERSION selects the version of Kubernetes that build and up use, by default %s.
The command versions lists the versions. %s=NAME is the default of --name.`, versionVariable, defaultKubernetes, nameVariable),
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		RunE:          func(command *cobra.Command, _ []string) error { return command.Help() },
	}
	root.CompletionOptions.DisableDefaultCmd = true
	root.PersistentFlags().StringVar(&name, "name", cmp.Or(os.Getenv(nameVariable), "cleave"), "name of the cluster")
	root.PersistentFlags().StringVar(&state, "state", "", "directory of the cluster's state (default /var/lib/cleave-e2e/NAME)")

	open := func() (*cluster, error) {
		if os.Geteuid() != 0 {
			return nil, errors.New("root access is required, because the launcher creates namespaces, mounts and network devices")
		}
		l, err := newLayout(name, state)
		if err != nil {
			return nil, err
		}
		return &cluster{layout: l, progress: newProgress(os.Stderr)}, nil
	}
	// with returns a command's function that first opens the cluster. If locked is true, no other
	// command can change the cluster while this command runs.
	with := func(locked bool, run func(context.Context, *cluster, []string) error) func(*cobra.Command, []string) error {
		return func(command *cobra.Command, args []string) error {
			c, err := open()
			if err != nil {
				return err
			}
			if locked {
				unlock, err := c.lock(command.Context())
				if err != nil {
					return err
				}
				defer unlock()
			}
			c.loadAddresses()
			return run(command.Context(), c, args)
		}
	}

	root.AddCommand(
		buildCommand(),
		versionsCommand(),
		upCommand(with),
		&cobra.Command{
			Use: "down", Short: "Remove the cluster and everything that it created", Args: cobra.NoArgs,
			RunE: with(true, func(ctx context.Context, c *cluster, _ []string) error { return c.down(ctx) }),
		},
		&cobra.Command{
			Use: "leftovers", Short: "List what a cluster left on the machine. Fails if the list is not empty", Args: cobra.NoArgs,
			RunE: with(false, func(ctx context.Context, c *cluster, _ []string) error {
				found, err := c.leftovers(ctx)
				if err != nil {
					return err
				}
				for _, line := range found {
					fmt.Println(line)
				}
				if len(found) > 0 {
					return exitCode(1)
				}
				return nil
			}),
		},
		&cobra.Command{
			Use: "env", Short: "Print shell commands that set KUBECONFIG, PATH and Helm's directories", Args: cobra.NoArgs,
			Example: "  eval \"$(cluster env)\"",
			RunE: with(false, func(_ context.Context, c *cluster, _ []string) error {
				if err := c.mustExist(); err != nil {
					return err
				}
				fmt.Print(c.layout.shellEnv())
				return nil
			}),
		},
		&cobra.Command{
			Use: "status", Short: "List the components with their PIDs. Fails if one is not running", Args: cobra.NoArgs,
			RunE: with(false, func(_ context.Context, c *cluster, _ []string) error { return c.status(os.Stdout) }),
		},
		componentCommand("stop", "Stop a component with SIGTERM, and wait until its process has exited", with,
			func(ctx context.Context, c *cluster, one component) error { return c.stop(ctx, one, unix.SIGTERM) }),
		componentCommand("kill", "Stop a component with SIGKILL, and wait until its process has exited", with,
			func(ctx context.Context, c *cluster, one component) error { return c.stop(ctx, one, unix.SIGKILL) }),
		componentCommand("start", "Start a component, and wait until it serves", with,
			func(ctx context.Context, c *cluster, one component) error { return c.startAlone(ctx, one) }),
		componentCommand("restart", "Stop a component with SIGTERM and start it", with,
			func(ctx context.Context, c *cluster, one component) error {
				if err := c.stop(ctx, one, unix.SIGTERM); err != nil {
					return err
				}
				return c.startAlone(ctx, one)
			}),
		logsCommand(with),
		imageCommand(with),
		nodeCommand(with),
		execNodeCommand(with),
		hiddenNodeInit(),
		hiddenSpawn(),
		&cobra.Command{
			Use: commandEnforce, Hidden: true, Args: cobra.NoArgs,
			RunE: with(false, func(ctx context.Context, c *cluster, _ []string) error { return c.enforce(ctx) }),
		},
	)
	return root
}

// withCluster converts a function that uses an open cluster to the function of a command.
type withCluster func(locked bool, run func(context.Context, *cluster, []string) error) func(*cobra.Command, []string) error

func buildCommand() *cobra.Command {
	var toolkit bool
	command := &cobra.Command{
		Use: "build", Short: "Build the programs of the cluster into the cache", Args: cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			built, err := buildAll(command.Context(), toolkit, newProgress(os.Stderr))
			if err != nil {
				return err
			}
			for _, dir := range built.dirs() {
				fmt.Println(dir)
			}
			return nil
		},
	}
	command.Flags().BoolVar(&toolkit, "toolkit", false, "also build NVIDIA's container toolkit")
	return command
}

func versionsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "versions", Short: "List the versions of Kubernetes that can be built, oldest first", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			source, err := sourceDir()
			if err != nil {
				return err
			}
			available, err := kubernetesVersions(source)
			if err != nil {
				return err
			}
			for _, k := range available {
				fmt.Println(k)
			}
			return nil
		},
	}
}

func upCommand(with withCluster) *cobra.Command {
	var nodes int
	var options upOptions
	command := &cobra.Command{
		Use: "up", Short: "Create, repair or restart the cluster, and wait until its nodes are Ready", Args: cobra.NoArgs,
	}
	command.Flags().IntVar(&nodes, "nodes", 1, "minimum number of nodes, named node1, node2 …")
	driverRootFlag(command, &options.driverRoot)
	command.Flags().StringVar(&options.toolkit, "toolkit", "", "install the driver and NVIDIA's container toolkit below /usr, and configure its runtime in containerd: as the default runtime (default), or as the handler nvidia (class)")
	command.Flags().BoolVar(&options.policies, "network-policies", false, "enforce NetworkPolicies")
	command.Flags().StringToIntVar(&options.status, "node-status", nil, "seconds between status reports of a node's kubelet, as NODE=SECONDS (default 10, like Kubernetes)")
	command.RunE = with(true, func(ctx context.Context, c *cluster, _ []string) error {
		if nodes < 1 || nodes > maxNodes {
			return fmt.Errorf("--nodes %d: a cluster has 1 to %d nodes", nodes, maxNodes)
		}
		if !slices.Contains([]string{"", toolkitDefault, toolkitClass}, options.toolkit) {
			return fmt.Errorf("--toolkit %q: %s or %s", options.toolkit, toolkitDefault, toolkitClass)
		}
		for name, seconds := range options.status {
			if seconds < 1 || seconds > maxStatusSeconds {
				return fmt.Errorf("--node-status %s=%d: 1 to %d seconds", name, seconds, maxStatusSeconds)
			}
		}
		root, err := resolveDriverRoot(options.driverRoot)
		if err != nil {
			return err
		}
		options.driverRoot = root
		return c.up(ctx, nodes, options)
	})
	return command
}

func driverRootFlag(command *cobra.Command, value *string) {
	command.Flags().StringVar(value, "driver-root", "", "directory that the node mounts read-only at "+driverRootInNode)
}

// resolveDriverRoot makes the path absolute, because later commands may run in other directories.
func resolveDriverRoot(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return "", fmt.Errorf("--driver-root: %w", err)
	}
	if !info.IsDir() {
		return "", fmt.Errorf("--driver-root: %s is not a directory", path)
	}
	return filepath.Abs(path)
}

func componentCommand(use, short string, with withCluster, run func(context.Context, *cluster, component) error) *cobra.Command {
	return &cobra.Command{
		Use: use + " COMPONENT...", Short: short, Args: cobra.MinimumNArgs(1),
		Long: short + ".\n\n" + componentHelp,
		RunE: with(true, func(ctx context.Context, c *cluster, args []string) error {
			// Check the names of all components before changing a component.
			components := make([]component, 0, len(args))
			for _, arg := range args {
				one, err := c.component(arg)
				if err != nil {
					return err
				}
				components = append(components, one)
			}
			for _, one := range components {
				if err := run(ctx, c, one); err != nil {
					return fmt.Errorf("%s: %w", one, err)
				}
			}
			return nil
		}),
	}
}

func logsCommand(with withCluster) *cobra.Command {
	var follow bool
	var lines int
	command := &cobra.Command{
		Use: "logs COMPONENT", Short: "Print the log of a component", Args: cobra.ExactArgs(1),
		Long: "Print the log of a component.\n\n" + componentHelp,
	}
	command.Flags().BoolVarP(&follow, "follow", "f", false, "print new lines as they are logged")
	command.Flags().IntVarP(&lines, "tail", "n", 0, "print only this number of last lines (0: all)")
	command.RunE = with(false, func(_ context.Context, c *cluster, args []string) error {
		one, err := c.component(args[0])
		if err != nil {
			return err
		}
		from := "+1"
		if lines > 0 {
			from = fmt.Sprint(lines)
		}
		argv := []string{"tail", "-n", from}
		if follow {
			argv = append(argv, "-F")
		}
		return execProgram(append(argv, c.layout.logFile(one)))
	})
	return command
}

func nodeCommand(with withCluster) *cobra.Command {
	group := &cobra.Command{Use: "node", Short: "Add and remove nodes"}
	var driverRoot string
	add := &cobra.Command{
		Use: "add NAME", Short: "Add or restart a node, and wait until it is Ready", Args: cobra.ExactArgs(1),
	}
	driverRootFlag(add, &driverRoot)
	add.RunE = with(true, func(ctx context.Context, c *cluster, args []string) error {
		root, err := resolveDriverRoot(driverRoot)
		if err != nil {
			return err
		}
		return c.addNode(ctx, args[0], root)
	})
	group.AddCommand(add,
		&cobra.Command{
			Use: "remove NAME", Short: "Remove a node, its Node object and its state", Args: cobra.ExactArgs(1),
			RunE: with(true, func(ctx context.Context, c *cluster, args []string) error { return c.removeNode(ctx, args[0]) }),
		},
		&cobra.Command{
			Use: "list", Short: "List the nodes with their addresses and root directories", Args: cobra.NoArgs,
			RunE: with(false, func(_ context.Context, c *cluster, _ []string) error {
				nodes, err := c.layout.nodes()
				if err != nil {
					return err
				}
				for _, n := range nodes {
					fmt.Printf("%s\t%s\t%s\n", n.Name, c.layout.addresses.node(n), c.layout.nodeRoot(n.Name))
				}
				return nil
			}),
		},
	)
	return group
}

func execNodeCommand(with withCluster) *cobra.Command {
	command := &cobra.Command{
		Use: commandExecNode + " NODE COMMAND [ARGUMENT...]", Short: "Run a command on a node, in its namespaces", Args: cobra.MinimumNArgs(2),
		Example: "  cluster exec-node node1 ls /var/lib/kubelet/device-plugins",
		RunE: with(false, func(ctx context.Context, c *cluster, args []string) error {
			return c.execInNode(ctx, args[0], args[1:])
		}),
	}
	// Flags after NODE belong to the command that runs on the node.
	command.Flags().SetInterspersed(false)
	return command
}

func imageCommand(with withCluster) *cobra.Command {
	group := &cobra.Command{Use: "image", Short: "Build images without Docker, and import them into nodes"}
	var node string
	imports := &cobra.Command{
		Use: "import FILE.tar...", Short: "Import image archives into the nodes' containerd", Args: cobra.MinimumNArgs(1),
	}
	imports.Flags().StringVar(&node, "node", "all", "node name, or all for all current and future nodes")
	imports.RunE = with(true, func(ctx context.Context, c *cluster, args []string) error {
		for _, file := range args {
			if err := c.importImage(ctx, file, node); err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
		}
		return nil
	})

	var spec imageSpec
	var output string
	build := &cobra.Command{
		Use: "build --tag NAME:TAG [--add SOURCE:TARGET[:MODE]]... --output FILE.tar", Short: "Build an image archive from files", Args: cobra.NoArgs,
		Long: `Build an image archive from files. The same files give the same bytes.

Layers are, from the lowest: --base, --shell, the libraries of --ldd, --add.`,
		Example: `  cluster image build --tag localhost/app:dev --shell --ldd \
    --add target/debug/app:/usr/bin/app --entrypoint /usr/bin/app -o app.tar`,
		RunE: func(_ *cobra.Command, _ []string) error {
			size, err := buildImage(spec, output)
			if err != nil {
				return err
			}
			fmt.Printf("%s: %s, %.1f MiB\n", output, spec.Tag, float64(size)/(1<<20))
			return nil
		},
	}
	flags := build.Flags()
	flags.StringVar(&spec.Tag, "tag", "", "name of the image, as localhost/NAME:TAG")
	flags.StringVar(&spec.Base, "base", "none", "directory with a root file system to start from")
	flags.BoolVar(&spec.Shell, "shell", false, "add a shell and its commands: the machine's static busybox")
	flags.BoolVar(&spec.Libraries, "ldd", false, "add the shared libraries that the added programs need, from this machine")
	flags.StringArrayVar(&spec.Add, "add", nil, "file or directory, as SOURCE:TARGET[:MODE], mode octal")
	flags.StringArrayVar(&spec.Dirs, "dir", nil, "empty directory, as PATH[:MODE]")
	flags.StringArrayVar(&spec.Links, "link", nil, "symbolic link, as PATH:DESTINATION")
	flags.StringArrayVar(&spec.Entrypoint, "entrypoint", nil, "entry point, one flag for each word")
	flags.StringArrayVar(&spec.Cmd, "cmd", nil, "default arguments, one flag for each word")
	flags.StringArrayVar(&spec.Env, "env", nil, "environment variable, as NAME=VALUE")
	flags.StringArrayVar(&spec.Labels, "label", nil, "label, as NAME=VALUE")
	flags.StringVar(&spec.User, "user", "", "user, as UID[:GID]")
	flags.StringVar(&spec.WorkingDir, "workdir", "", "working directory")
	flags.StringVarP(&output, "output", "o", "", "file to write")
	for _, name := range []string{"tag", "output"} {
		if err := build.MarkFlagRequired(name); err != nil {
			panic(err) // the flag is defined above
		}
	}
	group.AddCommand(imports, build)
	return group
}

func hiddenNodeInit() *cobra.Command {
	return &cobra.Command{
		Use: commandNodeInit, Hidden: true, Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			var spec nodeInitSpec
			if err := json.NewDecoder(os.Stdin).Decode(&spec); err != nil {
				return err
			}
			return nodeInit(spec)
		},
	}
}

func hiddenSpawn() *cobra.Command {
	return &cobra.Command{
		Use: commandSpawn, Hidden: true, Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			var spec spawnSpec
			if err := json.NewDecoder(os.Stdin).Decode(&spec); err != nil {
				return err
			}
			return spawn(spec)
		},
	}
}

// execProgram replaces this process with another program.
func execProgram(argv []string) error {
	path, err := lookPath(argv[0])
	if err != nil {
		return err
	}
	if err := unix.Exec(path, argv, os.Environ()); err != nil {
		return fmt.Errorf("run %s: %w", strings.Join(argv, " "), err)
	}
	return nil
}
