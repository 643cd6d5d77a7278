//! Splits and joins arguments like `iptables-save` and `iptables-restore` (`xtables_save_string` and
//! `add_param_to_argv` of iptables): white space separates, double quotes enclose arguments with white space, a
//! backslash precedes quotes and backslashes.

/// Returns `None` if a quote is not closed.
pub(super) fn split(line: &str) -> Option<Vec<String>> {
    let (mut tokens, mut token) = (Vec::new(), None::<String>);
    let (mut quoted, mut escaped) = (false, false);
    for c in line.chars() {
        match c {
            _ if escaped => {
                token.get_or_insert_default().push(c);
                escaped = false;
            }
            '\\' if quoted => escaped = true,
            '"' => {
                quoted = !quoted;
                token.get_or_insert_default();
            }
            ' ' | '\t' if !quoted => tokens.extend(token.take()),
            _ => token.get_or_insert_default().push(c),
        }
    }
    tokens.extend(token);
    (!quoted && !escaped).then_some(tokens)
}

pub(super) fn join(tokens: &[String]) -> String {
    let tokens: Vec<_> = tokens.iter().map(|token| quote(token)).collect();
    tokens.join(" ")
}

pub(super) fn quote(token: &str) -> String {
    let is_plain = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | '\'' | '\\');
    if !token.is_empty() && token.chars().all(is_plain) {
        return token.to_owned();
    }
    let mut quoted = String::from('"');
    for c in token.chars() {
        if matches!(c, '"' | '\'' | '\\') {
            quoted.push('\\');
        }
        quoted.push(c);
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_split_as_iptables_does_it() {
        let line = r#"-m comment --comment "a\'b\"c\\d e"  -j X ! "" end"#;
        let expected = [
            "-m",
            "comment",
            "--comment",
            r#"a'b"c\d e"#,
            "-j",
            "X",
            "!",
            "",
            "end",
        ];
        assert_eq!(split(line).unwrap(), expected);
    }

    #[test]
    fn what_is_joined_is_split_into_the_same() {
        let tokens = ["inpod schema=2", "", r#"it's "so" \ "#, "!", "-j", "x\ty"];
        let tokens = tokens.map(str::to_owned);
        assert_eq!(split(&join(&tokens)).unwrap(), tokens);
    }

    #[test]
    fn a_quote_that_is_not_closed_is_no_line() {
        assert_eq!(split(r#"--comment "a"#), None);
        assert_eq!(split(r#"--comment "a\"#), None);
    }
}
