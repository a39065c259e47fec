package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/google/go-containerregistry/pkg/compression"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// imageSpec contains the flags of the command image build.
type imageSpec struct {
	Tag, Base, User, WorkingDir                    string
	Shell, Libraries                               bool
	Add, Dirs, Links, Entrypoint, Cmd, Env, Labels []string
}

// entry is one file of a layer.
type entry struct {
	mode   fs.FileMode // type and permissions
	source string      // path of the content of a regular file
	link   string      // target of a symbolic link
}

// layer maps absolute paths to the files of a layer.
type layer map[string]entry

// addDir adds a directory and its parents. Existing entries are kept.
func (l layer) addDir(dir string, mode fs.FileMode) {
	for ; dir != "/"; dir, mode = path.Dir(dir), 0o755 {
		if _, ok := l[dir]; !ok {
			l[dir] = entry{mode: fs.ModeDir | mode}
		}
	}
}

func (l layer) addFile(target string, e entry) {
	l.addDir(path.Dir(target), 0o755)
	l[target] = e
}

// addTree adds a file, or a directory with its contents. If mode is 0, the files keep their modes.
func (l layer) addTree(source, target string, mode fs.FileMode) error {
	info, err := os.Stat(source)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		if mode == 0 {
			mode = info.Mode().Perm()
		}
		l.addFile(target, entry{mode: mode, source: source})
		return nil
	}
	return filepath.WalkDir(source, func(at string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		to := path.Join(target, filepath.ToSlash(strings.TrimPrefix(at, source)))
		switch {
		case d.IsDir():
			if to != "/" {
				l.addDir(path.Dir(to), 0o755)
				l[to] = entry{mode: fs.ModeDir | info.Mode().Perm() | info.Mode()&fs.ModeSticky}
			}
		case d.Type()&fs.ModeSymlink != 0:
			link, err := os.Readlink(at)
			if err != nil {
				return err
			}
			l.addFile(to, entry{mode: fs.ModeSymlink | 0o777, link: link})
		case d.Type().IsRegular():
			permissions := mode
			if permissions == 0 {
				permissions = info.Mode().Perm()
			}
			l.addFile(to, entry{mode: permissions, source: at})
		default:
			return fmt.Errorf("%s is neither a file nor a directory nor a link", at)
		}
		return nil
	})
}

// write writes the layer as a tar archive. The files are sorted, owned by root, and have no
// modification times.
func (l layer) write(out io.Writer) error {
	paths := make([]string, 0, len(l))
	for p := range l {
		paths = append(paths, p)
	}
	slices.Sort(paths)
	archive := tar.NewWriter(out)
	for _, p := range paths {
		if err := l[p].write(archive, strings.TrimPrefix(p, "/")); err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
	}
	return archive.Close()
}

func (e entry) write(archive *tar.Writer, name string) error {
	header := &tar.Header{Name: name, Mode: int64(e.mode.Perm()), Format: tar.FormatPAX}
	if e.mode&fs.ModeSticky != 0 {
		header.Mode |= 0o1000
	}
	switch {
	case e.mode.IsDir():
		header.Typeflag, header.Name = tar.TypeDir, name+"/"
		return archive.WriteHeader(header)
	case e.mode&fs.ModeSymlink != 0:
		header.Typeflag, header.Linkname = tar.TypeSymlink, e.link
		return archive.WriteHeader(header)
	}
	file, err := os.Open(e.source)
	if err != nil {
		return err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return err
	}
	header.Typeflag, header.Size = tar.TypeReg, info.Size()
	if err := archive.WriteHeader(header); err != nil {
		return err
	}
	_, err = io.Copy(archive, file)
	return err
}

// parseAdd parses SOURCE:TARGET[:MODE].
func parseAdd(text string) (source, target string, mode fs.FileMode, err error) {
	parts := strings.Split(text, ":")
	if len(parts) < 2 || len(parts) > 3 || parts[0] == "" {
		return "", "", 0, fmt.Errorf("--add %q: want SOURCE:TARGET[:MODE]", text)
	}
	if !path.IsAbs(parts[1]) {
		return "", "", 0, fmt.Errorf("--add %q: the target must begin with /", text)
	}
	if len(parts) == 3 {
		if mode, err = parseMode(parts[2]); err != nil {
			return "", "", 0, fmt.Errorf("--add %q: %w", text, err)
		}
	}
	return filepath.Clean(parts[0]), path.Clean(parts[1]), mode, nil
}

func parseMode(text string) (fs.FileMode, error) {
	bits, err := strconv.ParseUint(text, 8, 12)
	if err != nil {
		return 0, fmt.Errorf("mode %q is not octal, as 0755", text)
	}
	mode := fs.FileMode(bits & 0o777)
	if bits&0o1000 != 0 {
		mode |= fs.ModeSticky
	}
	return mode, nil
}

// layers returns the layers of the image, the lowest first.
func (s imageSpec) layers() ([]layer, error) {
	base, busybox, libraries, added := layer{}, layer{}, layer{}, layer{}
	if s.Base != "none" && s.Base != "" {
		if err := base.addTree(filepath.Clean(s.Base), "/", 0); err != nil {
			return nil, fmt.Errorf("--base: %w", err)
		}
	}
	if s.Shell {
		if err := busybox.addBusybox(); err != nil {
			return nil, err
		}
	}
	for _, text := range s.Add {
		source, target, mode, err := parseAdd(text)
		if err != nil {
			return nil, err
		}
		if err := added.addTree(source, target, mode); err != nil {
			return nil, fmt.Errorf("--add %q: %w", text, err)
		}
	}
	for _, text := range s.Dirs {
		dir, modeText, given := strings.Cut(text, ":")
		mode := fs.FileMode(0o755)
		if given {
			var err error
			if mode, err = parseMode(modeText); err != nil {
				return nil, fmt.Errorf("--dir %q: %w", text, err)
			}
		}
		if !path.IsAbs(dir) {
			return nil, fmt.Errorf("--dir %q: the path must begin with /", text)
		}
		added.addDir(path.Dir(path.Clean(dir)), 0o755)
		added[path.Clean(dir)] = entry{mode: fs.ModeDir | mode}
	}
	for _, text := range s.Links {
		at, to, ok := strings.Cut(text, ":")
		if !ok || !path.IsAbs(at) || to == "" {
			return nil, fmt.Errorf("--link %q: want PATH:DESTINATION, PATH beginning with /", text)
		}
		added.addFile(path.Clean(at), entry{mode: fs.ModeSymlink | 0o777, link: to})
	}
	if s.Libraries {
		if err := libraries.addLibraries(added); err != nil {
			return nil, err
		}
	}
	var all []layer
	for _, l := range []layer{base, busybox, libraries, added} {
		if len(l) > 0 {
			all = append(all, l)
		}
	}
	return all, nil
}

// addBusybox adds the machine's static busybox, and a link for each busybox command.
func (l layer) addBusybox() error {
	program, err := exec.LookPath("busybox")
	if err != nil {
		return errors.New("--shell: busybox is not installed (Debian: busybox-static)")
	}
	if libraries, err := sharedLibraries(program); err != nil {
		return err
	} else if len(libraries) > 0 {
		return fmt.Errorf("--shell: %s is not static (Debian: busybox-static)", program)
	}
	output, err := exec.Command(program, "--list").Output()
	if err != nil {
		return fmt.Errorf("%s --list: %w", program, err)
	}
	l.addFile("/bin/busybox", entry{mode: 0o755, source: program})
	for command := range strings.FieldsSeq(string(output)) {
		if command != "busybox" {
			l.addFile("/bin/"+command, entry{mode: fs.ModeSymlink | 0o777, link: "busybox"})
		}
	}
	return nil
}

// addLibraries adds the shared libraries that the programs of another layer need.
func (l layer) addLibraries(of layer) error {
	for _, e := range of {
		if e.source == "" {
			continue
		}
		libraries, err := sharedLibraries(e.source)
		if err != nil {
			return err
		}
		for _, library := range libraries {
			l.addFile(library, entry{mode: 0o755, source: library})
		}
	}
	return nil
}

// sharedLibraries returns the loader and the shared libraries of a program or library. For static
// programs and other files, the result is empty.
func sharedLibraries(file string) ([]string, error) {
	content, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer content.Close()
	magic := make([]byte, 4)
	if _, err := io.ReadFull(content, magic); err != nil || string(magic) != "\x7fELF" {
		return nil, nil
	}
	output, err := exec.Command("ldd", file).CombinedOutput()
	if bytes.Contains(output, []byte("not a dynamic executable")) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("ldd %s: %w: %s", file, err, bytes.TrimSpace(output))
	}
	libraries, err := parseLdd(string(output))
	if err != nil {
		return nil, fmt.Errorf("ldd %s: %w", file, err)
	}
	return libraries, nil
}

// parseLdd parses lines such as "libc.so.6 => /lib/libc.so.6 (0x…)" and "/lib64/ld-linux.so.2
// (0x…)".
func parseLdd(output string) ([]string, error) {
	var libraries []string
	for line := range strings.Lines(output) {
		fields := strings.Fields(line)
		switch {
		case len(fields) == 0 || strings.HasPrefix(fields[0], "linux-vdso") || fields[0] == "statically":
		case len(fields) >= 3 && fields[1] == "=>" && path.IsAbs(fields[2]):
			libraries = append(libraries, fields[2])
		case len(fields) == 2 && path.IsAbs(fields[0]):
			libraries = append(libraries, fields[0])
		default:
			return nil, fmt.Errorf("unexpected line %q", strings.TrimSpace(line))
		}
	}
	return libraries, nil
}

// buildImage writes the image as an archive for containerd. It returns the uncompressed size of the
// image's layers in bytes.
func buildImage(s imageSpec, output string) (int64, error) {
	tag, err := name.NewTag(s.Tag, name.StrictValidation)
	if err != nil {
		return 0, fmt.Errorf("--tag: %w", err)
	}
	for flag, pairs := range map[string][]string{"env": s.Env, "label": s.Labels} {
		for _, pair := range pairs {
			if key, _, ok := strings.Cut(pair, "="); !ok || key == "" {
				return 0, fmt.Errorf("--%s %q: want NAME=VALUE", flag, pair)
			}
		}
	}
	layers, err := s.layers()
	if err != nil {
		return 0, err
	}
	var image v1.Image = empty.Image
	var size int64
	for _, l := range layers {
		var content bytes.Buffer
		if err := l.write(&content); err != nil {
			return 0, err
		}
		size += int64(content.Len())
		opener := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content.Bytes())), nil }
		made, err := tarball.LayerFromOpener(opener, tarball.WithCompression(compression.None))
		if err != nil {
			return 0, err
		}
		if image, err = mutate.AppendLayers(image, made); err != nil {
			return 0, err
		}
	}
	file, err := image.ConfigFile()
	if err != nil {
		return 0, err
	}
	file = file.DeepCopy()
	file.OS, file.Architecture = "linux", runtime.GOARCH
	file.Config = v1.Config{
		Entrypoint: s.Entrypoint, Cmd: s.Cmd, User: s.User, WorkingDir: s.WorkingDir,
		Env: append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, s.Env...),
	}
	if len(s.Labels) > 0 {
		file.Config.Labels = make(map[string]string)
		for _, pair := range s.Labels {
			key, value, _ := strings.Cut(pair, "=")
			file.Config.Labels[key] = value
		}
	}
	if image, err = mutate.ConfigFile(image, file); err != nil {
		return 0, err
	}
	var archive bytes.Buffer
	if err := tarball.Write(tag, image, &archive); err != nil {
		return 0, err
	}
	if current, err := os.ReadFile(output); err == nil && bytes.Equal(current, archive.Bytes()) {
		return size, nil // unchanged, so do not rewrite it
	}
	return size, writeFile(output, archive.Bytes(), 0o644)
}

// imageTag returns the tag of the only image in an archive.
func imageTag(file string) (string, error) {
	manifest, err := tarball.LoadManifest(func() (io.ReadCloser, error) { return os.Open(file) })
	if err != nil {
		return "", fmt.Errorf("not an image archive: %w", err)
	}
	if len(manifest) != 1 || len(manifest[0].RepoTags) != 1 {
		return "", errors.New("want an archive of one image with one tag")
	}
	return manifest[0].RepoTags[0], nil
}
