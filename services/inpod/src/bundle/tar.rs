//! Writes ustar archives (tar(5)): each file has a header of 512 bytes, followed by its content in blocks of 512 bytes.

use std::io::{self, Write};

const BLOCK: usize = 512;

const MAX_NAME_BYTES: usize = 100;

/// Writes a file, and truncates a name that is too long for the header.
pub(super) fn file(to: &mut impl Write, name: &str, content: &[u8], time: u64) -> io::Result<()> {
    to.write_all(&header(name, content.len(), time))?;
    to.write_all(content)?;
    let over = content.len() % BLOCK;
    if over != 0 {
        to.write_all(&vec![0; BLOCK - over])?;
    }
    Ok(())
}

/// Writes the end of an archive, which is two empty blocks.
pub(super) fn end(to: &mut impl Write) -> io::Result<()> {
    to.write_all(&[0; 2 * BLOCK])
}

fn header(name: &str, size: usize, time: u64) -> Vec<u8> {
    let mut fields: Vec<u8> = Vec::with_capacity(BLOCK);
    let mut put = |text: &str, width: usize| {
        let bytes = text.as_bytes();
        let bytes = bytes.get(..width).unwrap_or(bytes);
        fields.extend_from_slice(bytes);
        fields.resize(fields.len() + width - bytes.len(), 0);
    };
    put(name, MAX_NAME_BYTES);
    put("0000600\0", 8);
    put("0000000\0", 8);
    put("0000000\0", 8);
    put(&format!("{size:011o}\0"), 12);
    put(&format!("{time:011o}\0"), 12);
    // The checksum is computed as if its own field contained blanks.
    put("        ", 8);
    put("0", 1);
    put("", 100);
    put("ustar\x0000", 8);
    put("", BLOCK - 265);
    let sum: u32 = fields.iter().map(|byte| u32::from(*byte)).sum();
    let sum = format!("{sum:06o}\0 ");
    if let Some(place) = fields.get_mut(148..156) {
        place.copy_from_slice(sum.as_bytes());
    }
    fields
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn tar_reads_what_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.tar");
        let mut archive = Vec::new();
        let long = vec![b'x'; 1500];
        file(&mut archive, "inpod/a.txt", b"hello", 1_700_000_000).unwrap();
        file(&mut archive, "inpod/empty", b"", 0).unwrap();
        file(&mut archive, "inpod/long", &long, 0).unwrap();
        end(&mut archive).unwrap();
        std::fs::write(&path, &archive).unwrap();
        let run = |arguments: &[&str]| {
            let output = Command::new("tar")
                .args(arguments)
                .current_dir(dir.path())
                .output();
            let output = output.expect("cannot run tar; is it installed?");
            assert!(output.status.success(), "{output:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        assert_eq!(
            run(&["-tf", "a.tar"]),
            "inpod/a.txt\ninpod/empty\ninpod/long\n"
        );
        run(&["-xf", "a.tar"]);
        let read = |name: &str| std::fs::read(dir.path().join("inpod").join(name)).unwrap();
        assert_eq!(read("a.txt"), b"hello");
        assert_eq!(read("empty"), b"");
        assert_eq!(read("long"), long);
    }
}
